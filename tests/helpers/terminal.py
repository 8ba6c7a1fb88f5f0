"""Commands run in a process of their own, one after the other: for what is read from the environment at the start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from hub_server import TOKEN

PROGRAM = """
import contextlib, io, json, os, sys, traceback
import finola
from finola.cli.main import main

def run(what):
    try:
        return main(what) if isinstance(what, list) else exec(what, globals())
    except SystemExit as end:
        return end.code
    except Exception:
        traceback.print_exc()
        return 1

for line in sys.stdin:
    what, variables = json.loads(line)
    os.environ.update(variables)
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = run(what)
    print(json.dumps([code, out.getvalue(), errors.getvalue()]), flush=True)
"""


class Terminal:
    """A process that runs commands, or Python, one after the other."""

    def __init__(self, **variables: str):
        self.home = Path(variables["HF_HOME"])
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        variables = {"HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN, **variables}  # the stand-in has no Xet
        self.process = subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment | variables, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __call__(self, *words, **variables: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of a command."""
        return self._ask([str(word) for word in words], variables)

    def python(self, code: str) -> str:
        """What some lines print; they must not fail."""
        failed, out, errors = self._ask(code, {})
        assert not failed, errors
        return out

    def fails(self, code: int, *words, **variables: str) -> str:
        """The one line of a command that must end so and print nothing else."""
        got, out, errors = self(*words, **variables)
        assert (got, out, errors.count("\n")) == (code, "", 1), errors
        return errors

    def cached(self, name: str) -> list[str]:
        """The files of a repository in the cache."""
        return [path.name for path in self.home.glob(f"hub/models--{name.replace('/', '--')}/snapshots/*/*")]

    def _ask(self, what: list[str] | str, variables: dict[str, str]) -> tuple[int, str, str]:
        self.process.stdin.write(json.dumps([what, {"HF_TOKEN": TOKEN, **variables}]) + "\n")
        self.process.stdin.flush()
        return tuple(json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        self.process.communicate(timeout=60)
