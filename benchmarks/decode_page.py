"""docs/decoding.md from the rows of docs/studies/decode.json."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from markdown import machine, met, table

PAGE = """# The decoder, measured

Made by `make bench-decode` from a finished demo; the numbers are in `docs/studies/decode.json`. All sides are timed in one
process, in turn on every prompt; a ratio's 95 % interval is bootstrapped over prompts. The *heavy twin* computes the same
function as the demo's target at about twelve times its cost (blocks whose output projections are zero), so acceptance stays
real while the target's cost dominates, as it does for models that are served. Ours and `transformers` run the same model
object, so what makes its products faster (`models/few_rows.py`) serves both.

**What a speed-up is predicted from.** `tokens_per_verify / (verify_cost + K · draft_cost)`, costs in plain target steps.
`verify_cost` is the median time of one target forward over the tree's nodes, the root included, over that of a forward over
one token; both are measured in turn between the timed runs, with as many tokens in the cache as those runs have half-way. `K
· draft_cost` is the median time of one whole proposal: its first step reads all tokens that the last verify accepted and
costs more than the others. A prediction is compared with the time after the first verify, which holds no prefill on either
side. What it leaves out is the time between forwards (accepting, keeping the path's keys and values), so measured over
predicted is a little below 1. The row "speed-up over plain decoding" is the whole wall-clock time, prefill included.

**Trees.** At temperature 0 the dynamic tree is EAGLE-2's: the draft's likeliest tokens, expanded and re-ranked by path
product. Above 0 its children are sampled without replacement, and which node gets another child is decided before that child
is drawn (`eval/sampled.py` has the proof that this is exact, and why re-ranking sampled nodes is not). The static tree is the
best one of its size for the acceptance by depth and rank measured on other prompts at the same temperature.

**First token.** The first token after a short prompt, decoded many times, against p: KL needs few outcomes (top-k 20) to be
small at a few thousand draws; TV is given in units of what as many draws from p itself would show.

Machine: {machine}.

{table}
"""


def page(rows: list[dict[str, Any]], environment: dict[str, Any]) -> str:
    """The page's text."""
    lines = []
    for row in rows:
        setting = ", ".join(f"{key} {value}" for key, value in row["settings"].items())
        interval = f"{row['low']:.2f} – {row['high']:.2f}" if "low" in row else ""
        value = f"{row['value']:.2f}" if abs(row["value"]) >= 0.1 else f"{row['value']:.4f}"
        lines.append((row["what"], setting, value, interval, row.get("goal", ""), met(row)))
    return PAGE.format(
        table=table(("what", "setting", "value", "95 %", "goal", "met"), lines), machine=machine(environment)
    )
