"""docs/eagle.md from the rows of the EAGLE study. Its words about results are chosen by the measured intervals alone."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from eagle_claims import CPU_SECONDS, MINUTES, TUNING
from eagle_heads import NEW_TOKENS, K
from markdown import machine, met, span, table

PAGE = """# EAGLE heads: what they are here, and which of the papers' claims hold

## What is implemented

All of these draft from the target's own hidden states and are trained by `draftsmith train-eagle` on the target's cache
([data caching](caching.md)); [training](training.md) has every option.

| `kind` | a slot joins | predicts with | papers |
|---|---|---|---|
| `eagle1` | the target's last state h_t and the embedding of x_(t+1) | the target's output head, frozen | 2401.15077, 2406.16858 |
| `eagle3` | a low, a middle and a high tap, fused, and the embedding of x_(t+1) | its own, on a draft vocabulary | 2503.01840 |
| `medusa` | the target's last state alone, a small head for each position | one per position | 2401.10774 |

EAGLE-2 is EAGLE-1's weights with a dynamic tree. EAGLE-3.1 is `norm_taps` and `norm_state`.
`rollouts` is EAGLE-3's training-time test: the head drafts from its own states while it is trained, so that step k has met what
step k − 1 makes of the data. `rollouts: 1` trains without it. [Decoding](decoding.md) says how chains and trees are verified.

## The study

Made by `{command}` from a finished demo; every number stands in `docs/studies/eagle.json`, with its settings. {budget}
Every head sees the same rows of the same cache in an order that its seed gives. The learning rates of EAGLE-1, of EAGLE-3 and of
both from the states were chosen with a seed and held-out texts of their own (last table). Heads differ from `eagle1` or
`eagle3` in what their name says; those of a *plain start* in that their layer starts at random (`embedding_start: false`), the
*random head* in its output head, too; those that start from the states (`states_start`), *all that helps* among them, in their
learning rate, too: an eighth of the others'.
*k-alpha* is teacher-forced: the acceptance of rollout step k, after k drafted tokens that were right, on held-out text; at
T = 0 the share of likeliest tokens that are the target's, at T = 1 the mean of Σ min(p, q) against the target's whole
distribution. *chain* and *tree* are tokens per verify, decoded: chains of {K}, and EAGLE-2's dynamic tree of 32 nodes (8 wide, 6
deep; for Medusa 5 deep). α is compared in points, tokens per verify as a ratio, over the texts and seeds that both sides have.
Intervals are 95 %, {intervals}. {chance}

Machine: {machine}. Revisions by which the heads were trained and measured: {revisions}.

## EAGLE-3 against EAGLE-1, the same tokens and the same tree

{goals}

On a real target of 30 blocks: [SmolLM2](smollm2.md).

## The papers' claims, one by one

{claims}

## All heads

Tokens per verify and teacher-forced acceptance; CPU seconds are those of training on one core.

{heads}

## How the learning rates were chosen

{tuning}

## What it means for a user

{meaning}

## Limits

The target is the demo's: four blocks of width 256, trained on little text, so its distributions are flat and its greedy choices
hard to guess; a head sees {tokens} tokens, the papers' billions. Directions may carry over, sizes do not. Texts end after
{new_tokens} tokens: the verify that is cut off there counts as a whole one, which takes a little from every number and most from
the better heads'. A layer of a four-block target costs a quarter of it: this page counts tokens per verify and says nothing of
speed ([decoding](decoding.md) measures that). The first comparison on a real target of 30 blocks has
[a page of its own](smollm2.md).
"""


def page(study: dict[str, Any]) -> str:
    """docs/eagle.md from docs/studies/eagle.json."""
    rows = study["rows"]
    claims = [row for row in rows if row["what"] == "claim"]
    measured = [row for row in rows if "row" in row["settings"]]
    heads = [row for row in measured if not row["settings"]["row"].startswith(TUNING)]
    tuning = [row for row in measured if row["settings"]["row"].startswith(TUNING)]
    [cost] = [row for row in rows if row["what"] == MINUTES]
    return PAGE.format(
        command=study["command"],
        K=K,
        budget=f"{cost['settings']['heads']} heads, {cost['value']:.0f} minutes on {cost['settings']['workers']} idle cores.",
        machine=machine(study["environment"]),
        revisions=", ".join(study["revisions"]),
        goals=goal_table(row for row in claims if "goal" in row),
        claims=claim_tables(claims),
        heads=head_table(heads),
        tuning=head_table(tuning),
        intervals=study["intervals"],
        chance=chance(claims),
        meaning=meaning(claims),
        tokens=tokens_of(heads),
        new_tokens=NEW_TOKENS,
    )


def chance(claims: list[dict[str, Any]]) -> str:
    """How many of the verdicts are to be expected where nothing differs."""
    judged = sum(row["seeds"] > 1 for row in claims)
    return f"{judged} comparisons are judged: where no two heads differed, about {judged / 20:.0f} would still be told apart."


def unit(row: dict[str, Any], value: float) -> str:
    return f"{value:.2f} ×" if row["settings"]["unit"] == "ratio" else f"{value:+.1f} points"


def compared(row: dict[str, Any]) -> str:
    """A comparison's value and interval."""
    low, high = (unit(row, row[name]).removesuffix(" points").removesuffix(" ×") for name in ("low", "high"))
    return f"{unit(row, row['value'])} ({low} to {high})"


def goal_table(rows: Iterable[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        about = row["settings"]
        values = (f"{about[side]:.2f}" for side in ("first", "second"))
        lines.append((about["sides"][0][1], *values, compared(row), row["goal"], met(row)))
    return table(("measure", "EAGLE-3", "EAGLE-1", "ratio (95 %)", "goal", "met"), lines)


def claim_tables(rows: list[dict[str, Any]]) -> str:
    """A table per section, a line per comparison."""
    tables = []
    for section in dict.fromkeys(row["settings"]["section"] for row in rows):
        lines, said = [], ""
        for row in rows:
            about = row["settings"]
            if about["section"] != section:
                continue
            (first, measure), (second, other) = about["sides"]
            here = f"{first} against {second}" if first != second else first
            paper, said = ("" if about["paper"] == said else about["paper"]), about["paper"]
            at = measure if measure == other else f"{measure}, against {other}"
            values = (number(about[side]) for side in ("first", "second"))
            few = f" ({row['seeds']} seeds)" if row["seeds"] == 2 else ""
            lines.append((paper, here, at, *values, compared(row), about["verdict"] + few))
        heads = ("the paper says", "here", "measure", "first", "second", "first against second", "we find")
        tables.append(f"### {section}\n\n{table(heads, lines)}")
    return "\n\n".join(tables)


def number(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}"


COLUMNS = (
    *(f"{kind}, T = {t}" for kind in ("chain", "tree") for t in "01"),
    *(f"{k}-alpha, T = {t}" for t in "01" for k in (0, 1, 4)),
    "ceiling",
)


def head_table(rows: list[dict[str, Any]]) -> str:
    """A line per head, a column per measure, over all domains."""
    lines: dict[str, list[str]] = {}
    cells: dict[tuple[str, str], str] = {}
    for row in rows:
        name = row["settings"]["row"]
        if row["what"] == CPU_SECONDS:
            lines[name] = [name.removeprefix(TUNING), str(row["count"]), f"{row['value']:.0f}"]
        elif row["settings"]["domain"] == "all":
            cells[name, row["what"]] = span(row)
    found = [[*start, *(cells.get((name, column), "–") for column in COLUMNS)] for name, start in lines.items()]
    return table(("head", "seeds", "CPU s", *COLUMNS), found)


def tokens_of(rows: list[dict[str, Any]]) -> str:
    counts = sorted({row["settings"]["trainer"]["tokens"] for row in rows if row["what"] == CPU_SECONDS})
    return " or ".join(f"{count:,}" for count in counts)


#: What a user does about a choice: (the claim's sides, what to set if the first is better, what if the second is).
ADVICE = [
    ("eagle3", "eagle1", "take `kind: eagle3`", "take `kind: eagle1`"),
    ("eagle3", "eagle3, no rollouts", "train with `rollouts` above 1", "leave `rollouts` at 1"),
    ("eagle3", "eagle3, 2 rollouts", "4 `rollouts` rather than 2", "2 `rollouts` are enough, and cheaper"),
    ("eagle3, 7 rollouts", "eagle3", "7 `rollouts` rather than 4", "4 `rollouts` are enough, and cheaper"),
    ("eagle3", "eagle3, feature loss", "leave `feature_loss` at 0", "set `feature_loss`"),
    (
        "eagle3",
        "eagle3, one tap",
        "fuse three depths",
        "fuse the last block alone, a third of the cache, where the engine loads it",
    ),
    ("eagle3", "eagle3, detached", "leave `detach` off", "set `detach`"),
    ("eagle3, decay 0.8", "eagle3", "set `decay: 0.8`", "leave `decay` at 1"),
    ("full teacher, -log acceptance", "full teacher, KL", "`loss: negative_log_acceptance`", "`loss: forward_kl`"),
    ("full teacher, adaptive", "full teacher, KL", "`loss: adaptive_kl_tv`", "`loss: forward_kl`"),
    ("full teacher, TV", "full teacher, KL", "`loss: total_variation`", "`loss: forward_kl`"),
    ("full teacher, KL", "eagle3", "`cache.distribution: from_last`", "keep the sampled teacher"),
    ("plain start", "random head", "leave `head_from_target` on", "set `head_from_target: false`"),
    ("eagle3", "plain start", "leave `embedding_start` on", "set `embedding_start: false`"),
    ("eagle3, start from the states", "eagle3", "set `states_start`", "leave `states_start` off"),
    ("eagle1, start from the states", "eagle1", "set `states_start`", "leave `states_start` off"),
    (
        "eagle3, all that helps",
        "eagle1, start from the states",
        "`kind: eagle3` with the last block's tap, `feature_loss` and `states_start`",
        "`kind: eagle1` with `states_start`, which trains in a quarter of the time",
    ),
    (
        "eagle3",
        "eagle3, V/2",
        "the whole vocabulary, where its head's cost does not matter",
        "`draft_vocabulary` of V/2",
    ),
    ("eagle3, V/2", "eagle3, V/4", "`draft_vocabulary` not below V/2", "`draft_vocabulary` of V/4"),
    ("eagle3, low, middle and last tap", "eagle3", "the last block among `cache.taps`", "leave `cache.taps` at auto"),
]


def meaning(claims: list[dict[str, Any]]) -> str:
    """A line per choice: what the measured intervals of tokens per verify speak for."""
    lines = []
    for first, second, do, instead in ADVICE:
        found = [row for row in claims if [side[0] for side in row["settings"]["sides"]] == [first, second]]
        found = [row for row in found if row["settings"]["unit"] == "ratio" and row["seeds"] > 1]
        for_first = [row for row in found if row["low"] > 1.0]
        for_second = [row for row in found if row["high"] < 1.0]
        shown = "; ".join(f"{row['settings']['sides'][0][1]}: {compared(row)}" for row in found)
        if for_first and not for_second:
            said = do
        elif for_second and not for_first:
            said = instead
        elif for_first:
            said = f"{do}, or {instead}, by the temperature"
        else:
            said = "no difference shown"
        if found:
            lines.append(f"- {first} against {second}: **{said}** ({shown}).")
    return "\n".join(lines)
