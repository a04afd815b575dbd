"""From the lines of the EAGLE study to its rows with intervals, and from these to docs/eagle.md.

Knows the papers' claims, and which of the study's heads stand for each; runs no model. Its words about results are chosen by the
measured intervals alone.
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from distill_page import interval, resampled, sums

K = 5  # tokens of a chain, and rollout steps that are measured
GOAL = 1.2  # EAGLE-3 with rollouts over EAGLE-1 in tokens per verify, same tokens, same dynamic tree
TUNING = "tuning: "
Entry = dict[str, Any]
#: What is measured: name → (where its sums stand in a line, kind, columns of numerator and denominator).
MEASURES: dict[str, tuple[str, str, tuple[int, int]]] = {
    **{f"{k}-alpha, T = {t}": ("forced", t, (k, K + k)) for t in "01" for k in range(K)},
    "ceiling": ("forced", "ceiling", (0, K)),
    **{f"{name}, T = {t}": ("decoded", f"{name} {t}", (0, 1)) for name in ("chain", "tree") for t in "01"},
    **{f"{k}-alpha of chains, T = {t}": ("decoded", f"chain {t}", (4 + k, 4 + K + k)) for t in "01" for k in range(K)},
}
Side = tuple[str, str]  # a head of the study and a measure


@dataclass(frozen=True)
class Claim:
    """What a paper says of two sides, and what it is worth to a user if it holds here. expects: that the first is better (+1),
    that it is worse (−1), or nothing (0): then the comparison is ours."""

    section: str
    paper: str
    first: str
    second: str
    measures: tuple[str, ...]
    expects: int = 1
    other: tuple[str, ...] = ()  # the second side's measures, where they are others

    @property
    def sides(self) -> list[tuple[Side, Side]]:
        others = self.other or self.measures
        return [((self.first, a), (self.second, b)) for a, b in zip(self.measures, others, strict=True)]


CHAINS, TREES = ("chain, T = 0", "chain, T = 1"), ("tree, T = 0", "tree, T = 1")
LOSSES = ("0-alpha, T = 1", *CHAINS)
LADDER, ROLLOUTS, HEAD = "What a slot joins (EAGLE-1)", "Rollouts", "Start and draft vocabulary"
TRAINING, LOSS, DECODING = "Training", "Losses, with the whole distribution as teacher", "Method and tree"
CLAIMS = [
    Claim(
        DECODING,
        "EAGLE-3 3.3: rollouts and three fused depths beat EAGLE-2, Llama-3.1-8B, MT-bench 4.05 → 6.13 tokens per verify",
        "eagle3",
        "eagle1",
        TREES,
    ),
    Claim(
        DECODING,
        "the same with what helped on its own: the last block among the taps, feature loss, whole distribution as teacher",
        "eagle3, all that helps",
        "eagle1",
        (*CHAINS, *TREES),
    ),
    Claim(
        DECODING,
        "the same with a layer that starts at random, as published; its output head from the target",
        "plain start",
        "eagle1",
        TREES,
    ),
    Claim(
        DECODING,
        "EAGLE-1 and 2: the tree adds to the chain, Vicuna-7B 3.20 → 3.94 with the static one (T = 0)",
        "eagle1",
        "eagle1",
        TREES[:1],
        other=CHAINS[:1],
    ),
    Claim(DECODING, "EAGLE-3: the same for its head", "eagle3", "eagle3", TREES[:1], other=CHAINS[:1]),
    Claim(
        DECODING,
        "EAGLE-3, table 1: EAGLE-1 beats Medusa, Vicuna-13B 3.96 to 2.51 tokens per verify, each with its tree",
        "eagle1",
        "medusa",
        (*CHAINS, TREES[0]),
    ),
    Claim(
        DECODING,
        "EAGLE-3, table 1: EAGLE-3 beats Medusa, Vicuna-13B 6.62 to 2.51",
        "eagle3",
        "medusa",
        (*CHAINS, TREES[0]),
    ),
    Claim(
        ROLLOUTS,
        "EAGLE-3, figure 4: without rollouts, dropping the feature loss raises 0-alpha",
        "plain start, no rollouts",
        "plain start, no rollouts, feature loss",
        ("0-alpha, T = 0", "0-alpha, T = 1"),
    ),
    Claim(
        ROLLOUTS,
        "EAGLE-3, figure 4: and 1-alpha collapses",
        "plain start, no rollouts",
        "plain start, no rollouts, feature loss",
        ("1-alpha, T = 0", "1-alpha, T = 1"),
        -1,
    ),
    Claim(
        ROLLOUTS,
        "EAGLE-3, 3.2: rollouts (here 4) repair it",
        "plain start",
        "plain start, no rollouts",
        ("1-alpha, T = 0", "1-alpha, T = 1", *CHAINS),
    ),
    Claim(ROLLOUTS, "the same with our start", "eagle3", "eagle3, no rollouts", ("1-alpha, T = 1", *CHAINS)),
    Claim(ROLLOUTS, "EAGLE-3, figure 4: more rollouts, better later steps", "eagle3", "eagle3, 2 rollouts", CHAINS),
    Claim(ROLLOUTS, "EAGLE-3's code rolls out 7 steps", "eagle3, 7 rollouts", "eagle3", CHAINS),
    Claim(
        LADDER,
        "EAGLE-1, figure 10: a feature says more than a token, 1.9 × against 1.5 ×",
        "eagle1, feature alone",
        "eagle1, token alone",
        ("0-alpha, T = 1", *CHAINS),
    ),
    Claim(
        LADDER,
        "EAGLE-1: feature and unshifted token beat the feature alone, at later steps",
        "eagle1, feature and unshifted token",
        "eagle1, feature alone",
        ("0-alpha, T = 1", "1-alpha, T = 1", *CHAINS),
    ),
    Claim(
        LADDER,
        "EAGLE-1: the shifted token, which was sampled from what the feature leaves open, beats both, 2.8 × against 1.9 ×",
        "eagle1",
        "eagle1, feature and unshifted token",
        ("0-alpha, T = 1", *CHAINS),
    ),
    Claim(
        TRAINING,
        "EAGLE-1 regresses to the target's state (weight 1 to 0.1 for the cross-entropy)",
        "eagle1",
        "eagle1, no feature loss",
        ("0-alpha, T = 1", "1-alpha, T = 1", *CHAINS),
    ),
    Claim(
        TRAINING,
        "EAGLE-3: with rollouts the feature loss only constrains, 4.05 → 5.37 without it",
        "eagle3",
        "eagle3, feature loss",
        ("0-alpha, T = 1", *CHAINS),
    ),
    Claim(
        TRAINING,
        "EAGLE-3: three fused depths beat the top one, 5.37 → 6.13",
        "eagle3",
        "eagle3, one tap",
        ("0-alpha, T = 1", *CHAINS),
    ),
    Claim(
        TRAINING,
        "Ours: the default taps of so shallow a target leave its last block out. Taken in",
        "eagle3, low, middle and last tap",
        "eagle3",
        LOSSES,
        0,
    ),
    Claim(
        TRAINING,
        "EAGLE-3's code back-propagates through all steps; HASS detaches",
        "eagle3",
        "eagle3, detached",
        CHAINS,
    ),
    Claim(TRAINING, "EAGLE-3's code weighs step k by 0.8^k", "eagle3, decay 0.8", "eagle3", LOSSES),
    Claim(
        LOSS,
        "LK losses: −log acceptance beats KL at T = 1, MT-bench 3.39 → 3.50",
        "full teacher, -log acceptance",
        "full teacher, KL",
        LOSSES,
    ),
    Claim(
        LOSS,
        "LK losses: the adaptive mixture beats KL at T = 1, 3.39 → 3.48",
        "full teacher, adaptive",
        "full teacher, KL",
        LOSSES,
    ),
    Claim(LOSS, "LK losses: TV alone is worse, 3.39 → 2.67", "full teacher, TV", "full teacher, KL", LOSSES, -1),
    Claim(
        LOSS,
        "64 draws of the distribution teach as much as all of it (Sparse Logit Sampling: within noise)",
        "full teacher, KL",
        "eagle3",
        LOSSES,
        0,
    ),
    Claim(HEAD, "Ours: the output head starts from the target's rows", "plain start", "random head", LOSSES, 0),
    Claim(HEAD, "Ours: the layer starts by passing the embedding on", "eagle3", "plain start", LOSSES, 0),
    Claim(
        HEAD, "EAGLE-3's code: a quarter of 128k is enough. Here all against half", "eagle3", "eagle3, V/2", LOSSES, 0
    ),
    Claim(HEAD, "the same: half against a quarter", "eagle3, V/2", "eagle3, V/4", LOSSES, 0),
]


def grouped(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """The lines of each head, by seed."""
    found: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: int(entry["job"]["seed"])):
        found.setdefault(entry["job"]["row"], []).append(entry)
    return found


def parts(group: list[Entry], measure: str, domain: str = "all") -> np.ndarray:
    """[seeds, texts, 2]: numerator and denominator of every text."""
    place, kind, columns = MEASURES[measure]
    return sums(group, domain, place, kind, columns)


def compared(groups: dict[str, list[Entry]], first: Side, second: Side) -> dict[str, Any]:
    """Ratio of tokens per verify, or difference in points of α, of two sides, paired over their common seeds and over texts."""
    seeds = {row: {entry["job"]["seed"] for entry in groups[row]} for row in (first[0], second[0])}
    both = seeds[first[0]] & seeds[second[0]]
    sides = [
        parts([entry for entry in groups[row] if entry["job"]["seed"] in both], measure)
        for row, measure in (first, second)
    ]
    (a, of_a), (b, of_b) = map(resampled, sides)
    count = int(sides[0][..., 1].sum())
    tokens = MEASURES[first[1]][0] == "decoded" and "alpha" not in first[1]
    found = interval(a / b, of_a / of_b, count) if tokens else interval(100 * (a - b), 100 * (of_a - of_b), count)
    return found | {"settings": {"unit": "ratio" if tokens else "points", "first": a, "second": b, "seeds": len(both)}}


def verdict(row: dict[str, Any], expects: int) -> str:
    """What the interval says of the expectation."""
    same = 1.0 if row["settings"]["unit"] == "ratio" else 0.0
    sign = 1 if row["low"] > same else -1 if row["high"] < same else 0
    if not sign:
        return "no difference shown"
    if not expects:
        return "the first is better" if sign > 0 else "the second is better"
    return "as the paper says" if sign == expects else "the other way"


def study_rows(entries: list[Entry], workers: int) -> list[dict[str, Any]]:
    """All rows of docs/studies/eagle.json: claims, heads, the choice of learning rates, minutes."""
    groups, rows = grouped(entries), []
    for claim in CLAIMS:
        if claim.first not in groups or claim.second not in groups:
            continue
        for first, second in claim.sides:
            found = compared(groups, first, second)
            found["settings"] |= {"section": claim.section, "paper": claim.paper, "expects": claim.expects}
            found["settings"] |= {"sides": [list(first), list(second)], "verdict": verdict(found, claim.expects)}
            if (claim.first, claim.second) == ("eagle3", "eagle1"):
                found |= {"goal": f">= {GOAL}", "met": found["value"] >= GOAL}
            rows.append({"what": "claim"} | found)
    for name, group in groups.items():
        about = {"row": name, "seeds": len(group), "parameters": group[0]["parameters"]}
        about["cpu_seconds"] = round(float(np.mean([entry["seconds"][0] for entry in group])), 1)
        about["settings"] = group[0]["job"]["settings"]
        for measure, (place, kind, _) in MEASURES.items():
            if kind not in group[0][place]["code"]:
                continue
            domains = (*group[0][place], "all") if "tree" in measure or "chain" in measure else ("all",)
            for domain in domains:
                found = interval(*of_group(group, measure, domain))
                rows.append({"what": measure, **found, "settings": about | {"domain": domain}})
    minutes = sum(entry["seconds"][1] for entry in entries) / 60 / workers
    cost = {"what": "minutes of all workers", "value": minutes, "settings": {"heads": len(entries), "workers": workers}}
    return [*rows, cost | {"goal": "<= 90", "met": minutes <= 90}]


def of_group(group: list[Entry], measure: str, domain: str) -> tuple[float, np.ndarray, int]:
    of_texts = parts(group, measure, domain)
    return *resampled(of_texts), int(of_texts[..., 1].sum())


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
Every head sees the same rows of the same cache in an order that its seed gives. EAGLE-1's learning rate was chosen beforehand, with
a seed and held-out texts of their own (last table); all others have the trainer's default, which that of EAGLE-1 is compared
with. *k-alpha* is teacher-forced: the acceptance of rollout step k, after k drafted tokens that were right, on held-out text; at
T = 0 the share of likeliest tokens that are the target's, at T = 1 the mean of Σ min(p, q) against the target's whole
distribution. *chain* and *tree* are tokens per verify, decoded: chains of {K}, and EAGLE-2's dynamic tree of 32 nodes (8 wide, 6
deep; for Medusa 5 deep). α is compared in points, tokens per verify as a ratio. Intervals are 95 %, bootstrapped over texts and,
crossed with them, seeds, the two sides alike; where a side lacks seeds, the row says so.

Machine: {machine}.

## EAGLE-3 against EAGLE-1, the same tokens and the same tree

{goals}

## The papers' claims, one by one

{claims}

## All heads

Tokens per verify and teacher-forced acceptance; CPU seconds are those of training on one core.

{heads}

## How EAGLE-1's learning rate was chosen

{tuning}

## What it means for a user

{meaning}

## Limits

The target is the demo's: four blocks of width 256, trained on little text, so its distributions are flat and its greedy choices
hard to guess; a head sees {tokens} tokens, the papers' billions. Directions may carry over, sizes do not. A layer of a four-block
target costs a quarter of it: this page counts tokens per verify and says nothing of speed ([decoding](decoding.md) measures that).
At T = 1 the dynamic tree drafts its likeliest tokens, not samples, so on a flat target a sampled chain may emit more.
"""


def page(study: dict[str, Any]) -> str:
    """docs/eagle.md from docs/studies/eagle.json."""
    rows = study["rows"]
    claims = [row for row in rows if row["what"] == "claim"]
    measured = [row for row in rows if "row" in row["settings"]]
    heads = [row for row in measured if not row["settings"]["row"].startswith(TUNING)]
    tuning = [row for row in measured if row["settings"]["row"].startswith(TUNING)]
    hardware = study["environment"]
    [cost] = [row for row in rows if row["what"].startswith("minutes")]
    return PAGE.format(
        command=study["command"],
        K=K,
        budget=f"{cost['settings']['heads']} heads, {cost['value']:.0f} minutes of {cost['settings']['workers']} cores.",
        machine=", ".join(f"{key} {value}" for key, value in hardware.items() if not isinstance(value, dict | list)),
        goals=goal_table(row for row in claims if "goal" in row),
        claims=claim_tables(claims),
        heads=head_table(heads),
        tuning=head_table(tuning),
        meaning=meaning(claims),
        tokens=tokens_of(heads),
    )


def unit(row: dict[str, Any], value: float) -> str:
    return f"{value:.2f} ×" if row["settings"]["unit"] == "ratio" else f"{value:+.1f} points"


def span(row: dict[str, Any]) -> str:
    """A comparison's value and interval."""
    low, high = (unit(row, row[name]).removesuffix(" points").removesuffix(" ×") for name in ("low", "high"))
    return f"{unit(row, row['value'])} ({low} to {high})"


def goal_table(rows: Iterable[dict[str, Any]]) -> str:
    lines = ["| measure | EAGLE-3 | EAGLE-1 | ratio (95 %) | goal | met |", "|---|---|---|---|---|---|"]
    for row in rows:
        about = row["settings"]
        met = "yes" if row["met"] else "**no**"
        measure = about["sides"][0][1]
        lines.append(
            f"| {measure} | {about['first']:.2f} | {about['second']:.2f} | {span(row)} | {row['goal']} | {met} |"
        )
    return "\n".join(lines)


def claim_tables(rows: list[dict[str, Any]]) -> str:
    """A table per section, a line per comparison."""
    tables = []
    for section in dict.fromkeys(row["settings"]["section"] for row in rows):
        lines = [
            f"### {section}\n",
            "| the paper says | here | measure | first | second | first against second | we find |",
        ]
        lines.append("|---|---|---|---|---|---|---|")
        said = ""
        for row in rows:
            about = row["settings"]
            if about["section"] != section:
                continue
            (first, measure), (second, other) = about["sides"]
            here = f"{first} against {second}" if first != second else first
            paper, said = ("" if about["paper"] == said else about["paper"]), about["paper"]
            at = measure if measure == other else f"{measure}, against {other}"
            values = f"{number(about['first'])} | {number(about['second'])}"
            few = "" if about["seeds"] > 2 else f" ({about['seeds']} seed{'s' * (about['seeds'] > 1)})"
            lines.append(f"| {paper} | {here} | {at} | {values} | {span(row)} | {about['verdict']}{few} |")
        tables.append("\n".join(lines))
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
    lines: dict[str, dict[str, str]] = {}
    about: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["settings"]["domain"] == "all":
            name = row["settings"]["row"]
            about[name] = row["settings"]
            lines.setdefault(name, {})[row["what"]] = f"{row['value']:.2f} ({row['low']:.2f}–{row['high']:.2f})"
    table = [f"| head | seeds | CPU s | {' | '.join(COLUMNS)} |", "|---|---|---|" + "---|" * len(COLUMNS)]
    for name, cells in lines.items():
        start = f"| {name.removeprefix(TUNING)} | {about[name]['seeds']} | {about[name]['cpu_seconds']:.0f} |"
        table.append(f"{start} {' | '.join(cells.get(column, '–') for column in COLUMNS)} |")
    return "\n".join(table)


def tokens_of(rows: list[dict[str, Any]]) -> str:
    counts = sorted({json.loads(row["settings"]["settings"])["tokens"] for row in rows})
    return " or ".join(f"{count:,}" for count in counts)


#: What a user does about a choice: (the claim's sides, what to set if the first is better, what if the second is).
ADVICE = [
    ("eagle3", "eagle1", "take `kind: eagle3`", "take `kind: eagle1`"),
    ("eagle3", "eagle3, no rollouts", "train with `rollouts` above 1", "leave `rollouts` at 1"),
    ("eagle3", "eagle3, 2 rollouts", "4 `rollouts` rather than 2", "2 `rollouts` are enough, and cheaper"),
    ("eagle3, 7 rollouts", "eagle3", "7 `rollouts` rather than 4", "4 `rollouts` are enough, and cheaper"),
    ("eagle3", "eagle3, feature loss", "leave `feature_loss` at 0", "set `feature_loss`"),
    ("eagle3", "eagle3, one tap", "fuse three depths", "fuse the last block alone: a third of the cache"),
    ("eagle3", "eagle3, detached", "leave `detach` off", "set `detach`"),
    ("eagle3, decay 0.8", "eagle3", "set `decay: 0.8`", "leave `decay` at 1"),
    ("full teacher, -log acceptance", "full teacher, KL", "`loss: negative_log_acceptance`", "`loss: forward_kl`"),
    ("full teacher, adaptive", "full teacher, KL", "`loss: adaptive_kl_tv`", "`loss: forward_kl`"),
    ("full teacher, TV", "full teacher, KL", "`loss: total_variation`", "`loss: forward_kl`"),
    ("full teacher, KL", "eagle3", "`cache.distribution: from_last`", "keep the sampled teacher"),
    ("plain start", "random head", "leave `head_from_target` on", "set `head_from_target: false`"),
    ("eagle3", "plain start", "leave `embedding_start` on", "set `embedding_start: false`"),
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
        found = [row for row in found if row["settings"]["unit"] == "ratio"]
        for_first = [row for row in found if row["low"] > 1.0]
        for_second = [row for row in found if row["high"] < 1.0]
        shown = "; ".join(f"{row['settings']['sides'][0][1]}: {span(row)}" for row in found)
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
