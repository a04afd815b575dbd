"""From the cases of `make test-serving` to the rows of its study, and from these to the table of docs/serving.md.

Knows compared numbers; runs neither an engine nor a decoder.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import markdown

ABOUT = ("draft", "layout", "method", "K", "spoilt")


def study_rows(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per case: `value` is the engine's acceptance length minus ours. An export spoilt on purpose is as it must be if the
    comparison found it out, and if less was accepted than of the good one."""
    rows = []
    for entry in entries:
        spoilt, faults = bool(entry["spoilt"]), entry["faults"]
        met = not faults
        if spoilt:
            met = bool(faults) and "difference" in entry and entry["difference"]["value"] < 0
        rows.append(
            {
                "what": "acceptance length, engine - ours",
                **entry.get("difference", {}),
                "settings": {name: entry[name] for name in ABOUT},
                "goal": "found out" if spoilt else "within the paired interval, tokens equal",
                "met": met,
                **{name: value for name, value in entry.items() if name not in (*ABOUT, "difference")},
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The parity table, then the same of the spoilt exports, as Markdown."""
    heads = ("engine", "method", "draft", "layout", "K", "greedy identical", "acceptance length, ours", "theirs")
    heads += ("equal verifies", "rates at positions 1 … K, ours", "theirs")
    good = markdown.table(heads, [_line(row) for row in rows if not row["settings"]["spoilt"]])
    heads = (
        "method",
        "draft",
        "what is wrong",
        "K",
        "greedy identical",
        "acceptance length, good",
        "spoilt",
        "found out",
    )
    bad = markdown.table(heads, [_spoilt_line(row) for row in rows if row["settings"]["spoilt"]])
    return f"{good}\n\nSpoilt on purpose, each of them loaded without complaint:\n\n{bad}"


def _line(row: dict[str, Any]) -> list[str]:
    about = row["settings"]
    cells = ["vLLM", f"`{about['method']}`", about["draft"], about["layout"] or "none", str(about["K"])]
    if "theirs" not in row:
        return [*cells, "; ".join(row["faults"]), *[""] * 5]
    (same, prompts), (equal, verifies) = row["identical"], row["equal_verifies"]
    cells += [f"{same}/{prompts}", _length(row["ours"]), _length(row["theirs"]), f"{equal:,}/{verifies:,}"]
    return [*cells, _rates(row["ours"]), _rates(row["theirs"])]


def _spoilt_line(row: dict[str, Any]) -> list[str]:
    about = row["settings"]
    cells = [f"`{about['method']}`", about["draft"], about["spoilt"], str(about["K"])]
    if "theirs" not in row:
        return [*cells, "; ".join(row["faults"]), "", "", "no"]
    same, prompts = row["identical"]
    return [*cells, f"{same}/{prompts}", _length(row["ours"]), _length(row["theirs"]), "yes" if row["met"] else "no"]


def _length(side: dict[str, Any]) -> str:
    length = side["length"]
    return markdown.span(length, 3) if "value" in length else "no drafts"


def _rates(side: dict[str, Any]) -> str:
    return ", ".join(f"{rate['value']:.3f}" for rate in side["positions"] if rate)


def write_table(rows: list[dict[str, Any]], page: Path) -> None:
    """Replace what stands between the marks of the page."""
    markdown.fill(page, "parity", table(rows))
