"""The two kinds of failure: the user's input is wrong (exit code 2, one line), or we are (exit code 1, a traceback)."""

from collections.abc import Sequence


class UserError(Exception):
    """Wrong input. The message is one line that names the file, the field and the remedy."""

    def __str__(self) -> str:
        """In one line that no terminal obeys, whatever names of files and tensors are in it."""
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in super().__str__())


class Stopped(BaseException):
    """The user or the system asked the command to end; all that was done is kept. Exit code 128 + `signal`.

    No `Exception`, so that nothing that survives failures (a tracker's, a row's) survives this.
    """

    def __init__(self, signal: int, message: str) -> None:
        super().__init__(message)
        self.signal = signal


def listed(items: Sequence[str], most: int = 8) -> str:
    """The first few of a list in one line, and how many more there are."""
    shown = [item if len(item) <= 160 else item[:159] + "…" for item in items[:most]]
    return "; ".join(shown) + (f"; and {len(items) - most} more" if len(items) > most else "")


def first_line(error: BaseException, limit: int = 200) -> str:
    """What an error says, in one line of at most `limit` characters; its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0][:limit] if lines else type(error).__name__
