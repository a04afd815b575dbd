"""What the stages say when they are done: lines and tables of their summaries, for a terminal or a log file."""

from pathlib import Path
from typing import Any

from rich.table import Table


def rows_table(summary: dict[str, Any]) -> Table:
    """Rows, tokens, supervised share and drops per split and domain, of what `prepare` returned."""
    table = Table(title="prepared rows", title_justify="left", title_style="bold")
    for heading in ("split", "domain"):
        table.add_column(heading)
    for heading in ("rows", "tokens", "supervised"):
        table.add_column(heading, justify="right")
    table.add_column("dropped")
    for split in ("train", "held_out"):
        for domain, counts in (*summary[split]["domains"].items(), ("all", summary[split])):
            drops = ", ".join(f"{count} {reason}" for reason, count in counts["drops"].items())
            numbers = (f"{counts['rows']:,}", f"{counts['tokens']:,}", f"{counts['supervised_share']:.1%}")
            table.add_row(split, domain, *numbers, drops, end_section=domain == "all")
    return table


def account_lines(account: dict[str, Any], folder: Path) -> list[str]:
    """The exact account of `regenerate`: what became of every document, and where the rows are."""
    parts = {key: account[key] for key in ("ok", "failed", "skipped")}
    total = " + ".join(f"{count:,} {name}" for name, count in parts.items())
    lines = [f"regenerate: {total} = {account['input']:,} documents ({account['ok_before']:,} were answered before)"]
    for name in ("failed", "skipped", "ended_early"):
        lines += [f"  {name.replace('_', ' ')}: {count:,} {why}" for why, count in account[f"{name}_because"].items()]
    if text := account["kept_as"].get("text"):
        lines.append(f"  {text:,} are kept as text: the server gave no token ids, and `prepare` renders them again")
    if account["failed"]:
        lines.append("  run again to try the failed ones once more")
    lines.append(f"regenerate: rows for data.sources: {{kind: json, path: {folder / 'rows.jsonl'}}}")
    return lines


def notes(summary: dict[str, Any]) -> list[str]:
    """What `prepare` has to say beside the table: rows that never became documents, and prompts that are no strangers."""
    about, found = summary["documents"], summary["contamination"]
    lines = []
    for reason, count in about["drops"].items():
        first = about["first"].get(reason)
        lines.append(
            f"prepare: {count:,} of {about['read']:,} dropped: {reason}" + (f", first {first}" if first else "")
        )
    if found["repeated"]:
        lines.append(
            f"prepare: warning: {found['repeated']:,} of {found['prompts']:,} held-out prompts also begin training rows"
        )
    return lines


def training_lines(summary: dict[str, Any]) -> list[str]:
    """One line for each value of what a training returned."""
    return [f"  {key.replace('_', ' ')}: {_short(value)}" for key, value in summary.items()]


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_short(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_short, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
