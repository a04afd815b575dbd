"""The EAGLE papers' claims, and from the lines of the study to its rows: claims and heads with their intervals.

Knows which of the study's heads stand for which claim; runs no model and knows no page.
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from bootstrap import Entry, Sums, gain, points, ratio_row, sums
from eagle_heads import K

GOAL = 1.2  # EAGLE-3 with rollouts over EAGLE-1 in tokens per verify, same tokens, same dynamic tree
TUNING = "tuning: "
CPU_SECONDS, MINUTES = "CPU seconds of training", "minutes, where every worker has a core"
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
    """What a paper says of two sides. expects: that the first is better (+1), that it is worse (−1), or nothing (0): a paper or its
    code does so without a comparison, or the comparison is ours."""

    section: str
    paper: str
    first: str
    second: str
    measures: tuple[str, ...]
    expects: int
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
        "EAGLE-3: rollouts and three fused depths beat EAGLE-2, Llama-3.1-8B, MT-bench 4.05 → 6.13 tokens per verify",
        "eagle3",
        "eagle1",
        TREES,
        1,
    ),
    Claim(
        DECODING,
        "Ours: the same with what may help on its own: the last block among the taps, feature loss, whole distribution as "
        "teacher, a start from the target's states",
        "eagle3, all that helps",
        "eagle1",
        (*CHAINS, *TREES),
        0,
    ),
    Claim(
        DECODING,
        "Ours: and against EAGLE-1 with the same start",
        "eagle3, all that helps",
        "eagle1, start from the states",
        (*CHAINS, *TREES),
        0,
    ),
    Claim(
        DECODING,
        "the first comparison with a layer that starts at random, as published; its output head from the target",
        "plain start",
        "eagle1",
        TREES,
        1,
    ),
    Claim(
        DECODING,
        "EAGLE-1 and 2: the tree adds to the chain, Vicuna-7B 3.20 → 3.94 with the static one (T = 0)",
        "eagle1",
        "eagle1",
        TREES[:1],
        1,
        other=CHAINS[:1],
    ),
    Claim(DECODING, "EAGLE-3: the same for its head", "eagle3", "eagle3", TREES[:1], 1, other=CHAINS[:1]),
    Claim(
        DECODING,
        "EAGLE-3's table: EAGLE-1 beats Medusa, Vicuna-13B 3.96 to 2.51 tokens per verify (T = 0, each with its tree)",
        "eagle1",
        "medusa",
        (*CHAINS, TREES[0]),
        1,
    ),
    Claim(
        DECODING,
        "EAGLE-3's table: EAGLE-3 beats Medusa, Vicuna-13B 6.62 to 2.51",
        "eagle3",
        "medusa",
        (*CHAINS, TREES[0]),
        1,
    ),
    Claim(
        ROLLOUTS,
        "EAGLE-3, figure 4: without rollouts, dropping the feature loss raises 0-alpha",
        "plain start, no rollouts",
        "plain start, no rollouts, feature loss",
        ("0-alpha, T = 0", "0-alpha, T = 1"),
        1,
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
        1,
    ),
    Claim(ROLLOUTS, "Ours: the same with our start", "eagle3", "eagle3, no rollouts", ("1-alpha, T = 1", *CHAINS), 0),
    Claim(
        ROLLOUTS,
        "EAGLE-3's figures show 3 steps, its code has 7. Here 4 against 2",
        "eagle3",
        "eagle3, 2 rollouts",
        CHAINS,
        0,
    ),
    Claim(ROLLOUTS, "the same: 7 against 4", "eagle3, 7 rollouts", "eagle3", CHAINS, 0),
    Claim(
        LADDER,
        "EAGLE-1: a feature says more than a token, 1.9 × against 1.5 ×",
        "eagle1, feature alone",
        "eagle1, token alone",
        ("0-alpha, T = 1", *CHAINS),
        1,
    ),
    Claim(
        LADDER,
        "EAGLE-1: feature and unshifted token beat the feature alone, at later steps",
        "eagle1, feature and unshifted token",
        "eagle1, feature alone",
        ("0-alpha, T = 1", "1-alpha, T = 1", *CHAINS),
        1,
    ),
    Claim(
        LADDER,
        "EAGLE-1: the shifted token, which was sampled from what the feature leaves open, beats both, 2.8 × against 1.9 ×",
        "eagle1",
        "eagle1, feature and unshifted token",
        ("0-alpha, T = 1", *CHAINS),
        1,
    ),
    Claim(
        TRAINING,
        "EAGLE-1 regresses to the target's state (weight 1 to 0.1 for the cross-entropy)",
        "eagle1",
        "eagle1, no feature loss",
        ("0-alpha, T = 1", "1-alpha, T = 1", *CHAINS),
        0,
    ),
    Claim(
        TRAINING,
        "EAGLE-3: with rollouts the feature loss only constrains, 4.05 → 5.37 without it",
        "eagle3",
        "eagle3, feature loss",
        ("0-alpha, T = 1", *CHAINS),
        1,
    ),
    Claim(
        TRAINING,
        "Ours: the two methods where both regress to the target's state",
        "eagle3, feature loss",
        "eagle1",
        LOSSES,
        0,
    ),
    Claim(TRAINING, "Ours: and where neither does", "eagle3", "eagle1, no feature loss", LOSSES, 0),
    Claim(
        TRAINING,
        "EAGLE-3: three fused depths beat the top one, 5.37 → 6.13",
        "eagle3",
        "eagle3, one tap",
        ("0-alpha, T = 1", *CHAINS),
        1,
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
        0,
    ),
    Claim(
        TRAINING,
        "HASS: EAGLE-1 gains from 3 rollouts, detached, Llama-2-7B 4.61 → 5.15",
        "eagle1, HASS",
        "eagle1",
        ("0-alpha, T = 1", "1-alpha, T = 1", *CHAINS),
        1,
    ),
    Claim(
        TRAINING,
        "EAGLE-3.1: norms on the taps and on the state that is fed back, Qwen3-8B 2.82 → 3.02",
        "eagle3, norms of 3.1",
        "eagle3",
        LOSSES,
        1,
    ),
    Claim(TRAINING, "EAGLE-3's code weighs step k by 0.8^k", "eagle3, decay 0.8", "eagle3", LOSSES, 0),
    Claim(
        LOSS,
        "LK losses: −log acceptance beats KL at T = 1, MT-bench 3.39 → 3.50",
        "full teacher, -log acceptance",
        "full teacher, KL",
        LOSSES,
        1,
    ),
    Claim(
        LOSS,
        "LK losses: the adaptive mixture beats KL at T = 1, 3.39 → 3.48",
        "full teacher, adaptive",
        "full teacher, KL",
        LOSSES,
        1,
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
        HEAD,
        "Ours: it starts as a guess of the target's next state, fitted to the same rows",
        "eagle3, start from the states",
        "eagle3",
        LOSSES,
        0,
    ),
    Claim(
        HEAD,
        "Ours: the same start for EAGLE-1",
        "eagle1, start from the states",
        "eagle1",
        (*LOSSES, *TREES),
        0,
    ),
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


def parts(group: list[Entry], measure: str, domain: str = "all") -> Sums:
    """Numerator and denominator of every text, by seed."""
    place, kind, columns = MEASURES[measure]
    return sums(group, domain, place, kind, columns)


def compared(first: Sums, second: Sums, tokens: bool) -> dict[str, Any]:
    """Ratio of tokens per verify, or difference in points of α, of two sides, with the value of each over the same seeds."""
    found = (gain if tokens else points)(first, second)
    a, b = (ratio_row({seed: side[seed] for seed in first.keys() & second.keys()})["value"] for side in (first, second))
    return found | {"settings": {"unit": "ratio" if tokens else "points", "first": a, "second": b}}


def verdict(row: dict[str, Any], expects: int) -> str:
    """What the interval says of the expectation."""
    if row["seeds"] < 2:
        return "one seed: not judged"
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
        for first, second in claim.sides:
            sides = [parts(groups.get(row, []), measure) for row, measure in (first, second)]
            if not sides[0].keys() & sides[1].keys():
                continue
            found = compared(*sides, tokens=first[1].startswith(("chain", "tree")))
            found["settings"] |= {"section": claim.section, "paper": claim.paper, "expects": claim.expects}
            found["settings"] |= {"sides": [list(first), list(second)], "verdict": verdict(found, claim.expects)}
            if (claim.first, claim.second) == ("eagle3", "eagle1"):
                found |= {"goal": f">= {GOAL}", "met": found["value"] >= GOAL}
            rows.append({"what": "claim"} | found)
    for name, group in groups.items():
        about = {"row": name}
        trained = {"parameters": group[0]["parameters"], "trainer": json.loads(group[0]["job"]["settings"])}
        seconds = float(np.mean([entry["seconds"][0] for entry in group]))
        rows.append({"what": CPU_SECONDS, "value": seconds, "count": len(group), "settings": about | trained})
        for measure, (place, kind, _) in MEASURES.items():
            by_domain = MEASURES[measure][2] == (0, 1)
            for domain in (*group[0][place], "all") if by_domain else ("all",):
                if kind in group[0][place]["code"] and (found := of_group(group, measure, domain)):
                    rows.append({"what": measure, **found, "settings": about | {"domain": domain}})
    minutes = sum(entry["seconds"][1] for entry in entries) / 60 / workers
    cost = {"what": MINUTES, "value": minutes, "settings": {"heads": len(entries), "workers": workers}}
    return [*rows, cost | {"goal": "<= 90", "met": minutes <= 90}]


def of_group(group: list[Entry], measure: str, domain: str) -> dict[str, Any]:
    """A head's value and interval; {} where nothing was counted: positions that no chain got to."""
    found = parts(group, measure, domain)
    return ratio_row(found) if any(of_texts[:, 1].any() for of_texts in found.values()) else {}
