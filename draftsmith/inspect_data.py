"""What a user can look at between the stages: prepared rows with their masks, and what a cache holds."""

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
OPEN, CLOSE = "⟦", "⟧"  # around supervised spans where colours are lost


def print_masks(config: Config, split: str, count: int) -> None:
    """The first `count` rows of each domain. Raises UserError for an unknown split or before `prepare`."""
    from draftsmith.data.rows import SPLITS, Rows
    from draftsmith.stages import Work

    if split not in SPLITS:
        raise UserError(f"--split {split}: give {' or '.join(SPLITS)}")
    rows = Rows.open(config.run / "rows", split)
    tokenizer = Work(config, print).tokenizer
    console = Console(highlight=False)
    for domain in rows.domains:
        chosen = [index for index in range(len(rows)) if rows.domain(index) == domain][:count]
        for row in (rows[index] for index in chosen):
            about = f" {row.document}: {len(row.token_ids)} tokens, {row.supervised.mean():.0%} supervised"
            console.print(Text.assemble("\n", (domain, "bold"), about))
            console.print(masked_text(row, tokenizer, marks=not console.is_terminal))


def masked_text(row: "Row", tokenizer: Any, marks: bool) -> Text:
    """The row's text with its supervised spans in colour, and between ⟦ and ⟧ where `marks` says so.

    Spans of one kind are decoded as a whole: a character may be spread over several tokens.
    """
    text, start = Text(), 0
    flags = row.supervised.tolist()
    for end in range(1, len(flags) + 1):
        if end < len(flags) and flags[end] == flags[start]:
            continue
        part = tokenizer.decode(row.token_ids[start:end].tolist(), skip_special_tokens=False)
        if flags[start]:
            text.append(f"{OPEN}{part}{CLOSE}" if marks else part, SUPERVISED)
        else:
            text.append(part, CONTEXT)
        start = end
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
