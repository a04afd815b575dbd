"""`python -m draftsmith` is the `draftsmith` command."""

from draftsmith.cli import main

if __name__ == "__main__":
    main()
