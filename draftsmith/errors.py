"""The two kinds of failure: the user's input is wrong (exit code 2, one line), or we are (exit code 1, a traceback)."""


class UserError(Exception):
    """Wrong input. The message is one line that names the file, the field and the remedy."""
