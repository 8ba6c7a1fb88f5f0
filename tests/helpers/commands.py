"""Commands run in the process of the tests."""

from __future__ import annotations

from finola.cli import main as cli


class Command:
    """`finola COMMAND`, to be called with pytest's `capsys` and the words that follow.

    `always` are words that end every call.
    """

    def __init__(self, *command: str, always: tuple[str, ...] = ()):
        self.command, self.always = command, always

    def __call__(self, capsys, *words) -> tuple[int, str, list[str]]:
        """The exit code, what was printed, and the lines on stderr."""
        code = cli.main([*self.command, *map(str, words), *self.always])
        printed = capsys.readouterr()
        return code, printed.out, printed.err.splitlines()

    def fails(self, capsys, code: int, *words) -> str:
        """The one line of a command that must end with `code` and print nothing else."""
        got, printed, errors = self(capsys, *words)
        assert (got, printed, len(errors)) == (code, "", 1), errors
        assert errors[0].startswith(f"finola {self.command[0]}: ")
        return errors[0]
