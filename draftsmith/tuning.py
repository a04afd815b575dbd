"""What `draftsmith tune` prints: the choice, what was decoded for real, where the page is. Reads tune.json; no torch."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def print_choice(run: Path, say: Callable[[str], None]) -> None:
    """One table and three lines."""
    from rich.console import Console
    from rich.table import Table

    from draftsmith.eval.skill import verdict

    document = json.loads((run / "tune.json").read_text(encoding="utf-8"))
    table = Table(title="decoded for real", title_justify="left", title_style="bold")
    for heading in ("draft", "tree", "drafting"):
        table.add_column(heading)
    for heading in ("tokens/verify", "predicted", "speed-up", "predicted"):
        table.add_column(heading, justify="right")
    for entry in document["verified"]:
        tau, speed = entry["measured_tokens_per_verify"]["value"], entry["speedup"]
        timed = (f"{speed['value']:.2f}", f"{entry['foreseen']['value']:.2f}") if speed else ("", "")
        row = (entry["draft"], entry["tree"], entry["drafting"], f"{tau:.2f}")
        table.add_row(*row, f"{entry['predicted_tokens_per_verify']:.2f}", *timed)
    if document["verified"]:
        Console().print(table)
    say(verdict(document).replace("**", ""))
    if document["chosen"]["pays"]:
        _say_limits(document["runtime"], say)
    say(f"skill: {run / 'skill-speculative-tuning.md'}")


def _say_limits(gate: Mapping[str, Any], say: Callable[[str], None]) -> None:
    say(
        f"temperature up to {gate['most_temperature']:g}, batch up to {gate['most_batch']}, fall back below an acceptance rate of "
        f"{gate['break_even']:.3f} over {gate['window']} verifies"
    )
