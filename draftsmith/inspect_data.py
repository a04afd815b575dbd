"""What a user can look at between the stages: prepared rows with their masks, and what a cache holds."""

import io
import itertools
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftsmith.config import Config
from draftsmith.errors import UserError
from draftsmith.settings import flat

if TYPE_CHECKING:
    from draftsmith.data.rows import Row

SUPERVISED = "bold green"
CONTEXT = "dim"
SPECIAL = "cyan"  # special tokens, bold where they are supervised
OPEN, CLOSE = "⟦", "⟧"  # around supervised spans where there is no colour
ORIGINS = {  # of a mask: `Rendered.how` in words
    "marks": "by the template's marks",
    "difference": "by difference of renderings",
    "text": "of whole texts",
    "given": "as given",
}
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # what would move a terminal's cursor or change its state


def print_masks(config: Config, split: str, count: int, domain: str | None = None) -> None:
    """The first `count` rows of each domain, or of one. Raises UserError for what is not there or before `prepare`."""
    from draftsmith.data.rows import SPLITS, Rows
    from draftsmith.work import Work

    if split not in SPLITS:
        raise UserError(f"--split {split}: give {' or '.join(SPLITS)}")
    rows = Rows.open(config.run / "rows", split)
    if domain is not None and domain not in rows.domains:
        raise UserError(f"--domain {domain}: the {split} split has {', '.join(rows.domains)}; give one of them")
    about = _mask_lines(config.run / "rows" / "summary.json", split, rows.domains)
    tokenizer = Work(config, print).tokenizer
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that lacks a character shows its number
    console = Console(highlight=False)
    colourless = console.no_color or console.color_system is None
    for name in rows.domains if domain is None else [domain]:
        console.print(Text.assemble("\n", (name, "bold"), f": {about[name]}"))
        chosen = (index for index in range(len(rows)) if rows.domain(index) == name)
        for row in (rows[index] for index in itertools.islice(chosen, count)):
            size = f"{len(row.token_ids)} tokens, {row.supervised.mean():.0%} supervised"
            console.print(Text(f"\n{row.document}: {size}", "italic"))
            console.print(masked_text(row, tokenizer, marks=colourless))


def _mask_lines(path: Path, split: str, domains: list[str]) -> dict[str, str]:
    """`mask_line` of each domain. Raises UserError where the summary is gone, damaged, or of other rows."""
    try:
        counts = json.loads(path.read_text(encoding="utf-8"))[split]["domains"]
        return {name: mask_line(counts[name]) for name in domains}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path}: missing, damaged, or of other rows; run `draftsmith prepare` again") from error


def mask_line(counts: dict[str, Any]) -> str:
    """Rows, supervised share and where the masks come from, of what `prepare` noted for a domain."""
    masks = ", ".join(f"{number:,} {ORIGINS[how]}" for how, number in counts["masks"].items())
    return f"{counts['rows']:,} rows, {counts['supervised_share']:.1%} of the tokens supervised; masks: {masks}"


def masked_text(row: "Row", tokenizer: Any, marks: bool) -> Text:
    """The row's text with its supervised spans in colour, and between ⟦ and ⟧ where `marks` says so; special tokens stand out.

    Tokens of one kind are decoded together: a character may be spread over several.
    """
    special = set(tokenizer.all_special_ids)
    ids, flags = row.token_ids.tolist(), row.supervised.tolist()
    text = Text()
    for supervised, span in itertools.groupby(range(len(ids)), key=flags.__getitem__):
        text.append(OPEN if supervised and marks else "", SUPERVISED)
        for is_special, run in itertools.groupby(span, key=lambda place: ids[place] in special):
            part = tokenizer.decode([ids[place] for place in run], skip_special_tokens=False)
            plain = SUPERVISED if supervised else CONTEXT
            style = f"{SPECIAL} {'bold' if supervised else 'dim'}" if is_special else plain
            text.append(CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", part), style)
        text.append(CLOSE if supervised and marks else "", SUPERVISED)
    return text


def print_cache_info(path: Path) -> None:
    """Target, fields, codecs, data, size. Raises UserError where there is no cache."""
    from draftsmith.data.cache.verify import cache_info

    table = Table(title=str(path), title_justify="left", title_style="bold", show_header=False)
    table.add_column("what", style="dim")
    table.add_column("value", overflow="fold")
    for key, value in flat(cache_info(path)).items():
        table.add_row(key, Text(_readable(key, value)))  # as it stands: brackets are no markup
    Console().print(table)


def _readable(key: str, value: object) -> str:
    """A manifest's value for the eye: 256,120,001 bytes are `256.1 MB`, a share has four digits."""
    if key == "bytes" and isinstance(value, int):
        return f"{value / 1e6:,.1f} MB"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def print_cache_damage(path: Path) -> None:
    """One line when every byte is as it was written. Raises UserError naming what is not."""
    from draftsmith.data.cache.verify import cache_info, verify_cache

    damage, about = verify_cache(path), cache_info(path)
    if damage:
        raise UserError(f"{path}: {'; '.join(damage)}; run `draftsmith cache-repair CONFIG` to rebuild what is damaged")
    print(
        f"{path}: {about['shards']} shards, {about['rows']:,} rows, {about['bytes']:,} bytes: every checksum is right"
    )
