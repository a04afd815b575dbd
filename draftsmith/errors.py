"""The two kinds of failure: the user's input is wrong (exit code 2, one line), or we are (exit code 1, a traceback)."""


class UserError(Exception):
    """Wrong input. The message is one line that names the file, the field and the remedy."""


class Stopped(BaseException):
    """The user or the system asked the command to end; all that was done is kept. Exit code 128 + `signal`.

    No `Exception`, so that nothing that survives failures (a tracker's, a row's) survives this.
    """

    def __init__(self, signal: int, message: str) -> None:
        super().__init__(message)
        self.signal = signal


def first_line(error: BaseException, limit: int = 200) -> str:
    """What an error says, in one line of at most `limit` characters; its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0][:limit] if lines else type(error).__name__
