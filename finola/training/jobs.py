"""One run in a process of its own, which a failure or a signal of another cannot harm.

`python -m finola.training.jobs` reads what to do from its standard input, one line of JSON: the arguments of
`finola.training.engine.fit`, the recipe by its name. When that input ends, because the process that started it is gone,
however it went, it writes a checkpoint and stops.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import IO, Any

from filelock import FileLock

from finola.errors import FinolaError

PATIENCE = 600  # seconds: for the run of a process that was killed to write its checkpoint


class Job:
    """A run under way; its output is added to `log`."""

    def __init__(self, request: dict[str, Any], log: Path, threads: int):
        self.log = log
        self._read = log.stat().st_size if log.exists() else 0  # bytes of the log
        environment = {"OMP_NUM_THREADS": str(threads)} | dict(os.environ)
        with open(log, "ab") as file:
            self.process = subprocess.Popen(  # in its own session: Ctrl-C goes to this process alone
                [sys.executable, "-m", "finola.training.jobs"], stdin=subprocess.PIPE, stdout=file, stderr=file,
                env=environment, start_new_session=True)
        assert self.process.stdin is not None
        self.input: IO[bytes] = self.process.stdin
        self.input.write(json.dumps(request).encode() + b"\n")
        self.input.flush()

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        return self.process.poll()

    def stop(self) -> None:
        """Ask for a checkpoint and the end."""
        self.input.close()

    def wait(self) -> None:
        self.process.wait()

    def new_lines(self) -> list[str]:
        """What it has printed since this was last asked, in whole lines."""
        with open(self.log, "rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
        if not whole:
            return []
        self._read += len(whole) + 1
        return [line for line in whole.decode(errors="replace").splitlines() if line.strip()]

    @property
    def last_words(self) -> str:
        """The last line that it printed."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


def main() -> int:
    signal.signal(signal.SIGTERM, _on_sigterm)
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_follow, daemon=True).start()
    try:
        return _fit(**request)
    except FinolaError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"{error.filename}: {error.strerror}" if error.filename else error, file=sys.stderr)
        return 3


def _fit(recipe: str, overrides: list[str], data: list[str], val: list[str], out: str, start: str | None) -> int:
    import logging

    from finola.training.engine import fit
    from finola.training.recipe import load_recipe
    from finola.training.tasks.base import NonFiniteLoss

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{out}.lock", timeout=PATIENCE):
        try:
            fit(load_recipe(recipe, overrides), data, val, out, resume=True, init_from=start)
        except NonFiniteLoss:  # result.json says so
            return 0
    return 0


def _follow() -> None:
    """Waits for the end of the input, then asks this process to stop. (`sys.stdin.read` would hold a lock that the
    forked workers of a data loader wait for.)"""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _on_sigterm(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
