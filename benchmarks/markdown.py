"""What the studies' pages are put together from: tables, values with their intervals, the machine. Knows no study."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from draftsmith.files import publish_text

Row = dict[str, Any]


def table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *(f"| {' | '.join(c)} |" for c in lines)])


def span(row: Row, digits: int = 2, to: str = "–") -> str:
    """A value and its interval."""
    return f"{row['value']:.{digits}f} ({row['low']:.2f}{to}{row['high']:.2f})"


def met(row: Row) -> str:
    """Whether a goal is met; nothing where the row has none."""
    return {True: "yes", False: "**no**"}.get(row.get("met"), "")


def machine(environment: Row) -> str:
    single = {key: value for key, value in environment.items() if not isinstance(value, dict | list)}
    return ", ".join(f"{key} {value}" for key, value in single.items() if value is not None)


def fill(page: Path, name: str, text: str) -> None:
    """Put `text` between the marks of that name in a page."""
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(start)
    publish_text(page, f"{before}{start}\n{text}\n\n{end}{rest.partition(end)[2]}")
