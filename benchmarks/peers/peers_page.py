"""From the lines of the peers' benchmark to its rows with intervals, and from these to docs/peers.md.

Knows the benchmark's numbers; runs no model.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bootstrap import Entry, Sums, gain, pooled, ratio_row
from markdown import machine, met, span, table

#: what a line of training says of its recipe, by its name in ours, speculators' or SpecForge's settings
TOLD = {
    "rollouts": ("rollouts", "ttt_steps", "ttt_length"),
    "decay": ("ttt_step_loss_decay", "decay"),
    "learning_rate": ("other_lr", "lr", "learning_rate"),
}

GOAL = 1.1  # tokens per verify, ours over the better peer
GAIN = "tokens per verify, ours over the better peer"
LONG = "on more tokens"
LONGER = f"{GAIN}, {LONG}"
ONE_SEED = "tokens per verify, ours at seed 0"
TAU, CHOSEN_BY, STEP, SAME = "tokens per verify", "tokens per verify that chose the rate", "seconds per step", "logits"


def of(entries: Sequence[Entry], what: str, recipe: str, **job: Any) -> list[Entry]:
    """The lines of one kind and recipe whose job has these values, by seed."""
    found = [e for e in entries if e["what"] == what and e["job"]["recipe"] == recipe]
    found = [e for e in found if all(e["job"][key] == value for key, value in job.items())]
    return sorted(found, key=lambda entry: int(entry["job"]["seed"]))


def parts(group: Sequence[Entry], setting: str) -> Sums:
    """Tokens and verifies of every prompt [prompts, 2], by seed."""
    return {int(entry["job"]["seed"]): np.array(entry["decoded"][setting], dtype=float) for entry in group}


def best_of(entries: Sequence[Entry], peer: str) -> Entry:
    """Of a peer's lines, the one with the most tokens per verify on the prompts that choose, mean over what is decoded."""

    def score(entry: Entry) -> float:
        return float(np.mean([pooled(parts([entry], setting)).value for setting in entry["decoded"]]))

    return max(of(entries, "choosing", peer, seed=0), key=score)


def rate_name(job: dict[str, Any]) -> str:
    return "default" if job["rate"] is None else f"{job['rate']:g}"


def study_rows(entries: Sequence[Entry], tokens: int) -> list[dict[str, Any]]:
    """All rows of docs/studies/peers.json."""
    peers = sorted({e["job"]["recipe"] for e in entries} - {"ours"})
    best = {peer: best_of(entries, peer)["job"]["rate"] for peer in peers}
    ours = of(entries, "final", "ours", change="")
    rows = [
        row | {"what": GAIN, "goal": f">= {GOAL}", "met": row["value"] >= GOAL}
        for row in gain_rows(ours, {peer: of(entries, "final", peer, rate=best[peer]) for peer in peers}, tokens)
    ]
    for peer in peers:
        for setting in ours[0]["decoded"]:
            found = gain(parts(ours, setting), parts(of(entries, "final", peer, rate=None), setting))
            about = {"decoding": setting, "peer": peer, "rate": "default", "tokens": tokens}
            rows.append({"what": "tokens per verify, ours over a peer at its default rate", **found, "settings": about})
    for kind, what in (("final", TAU), ("choosing", CHOSEN_BY)):
        rows += decoded_rows(entries, kind, what, tokens)
    rows += decoded_rows(of(entries, "final", "ours", change="", seed=0), "final", ONE_SEED, tokens)
    return rows + training_rows(entries, tokens)


def gain_rows(ours: Sequence[Entry], theirs: dict[str, list[Entry]], tokens: int) -> list[dict[str, Any]]:
    """Ours over the better of the peers, for each way of decoding."""
    rows = []
    for setting in ours[0]["decoded"]:
        sides = {peer: parts(group, setting) for peer, group in theirs.items()}
        better = max(sides, key=lambda peer: pooled(sides[peer]).value)
        rate = rate_name(theirs[better][0]["job"])
        about = {"decoding": setting, "peer": better, "rate": rate, "tokens": tokens}
        rows.append({**gain(parts(ours, setting), sides[better]), "settings": about})
    return rows


def longer_rows(entries: Sequence[Entry], tokens: int) -> list[dict[str, Any]]:
    """The rows of the chosen recipes on more tokens."""
    peers = sorted({e["job"]["recipe"] for e in entries} - {"ours"})
    found = gain_rows(of(entries, "final", "ours"), {peer: of(entries, "final", peer) for peer in peers}, tokens)
    return [row | {"what": LONGER} for row in found] + decoded_rows(entries, "final", f"{TAU}, {LONG}", tokens)


def groups(entries: Sequence[Entry], what: str) -> dict[tuple[str, str, str], list[Entry]]:
    """The lines of one kind by recipe, rate and change, seeds together."""
    found: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in sorted((e for e in entries if e["what"] == what), key=lambda e: int(e["job"]["seed"])):
        job = entry["job"]
        found.setdefault((job["recipe"], rate_name(job), job["change"]), []).append(entry)
    return found


def decoded_rows(entries: Sequence[Entry], kind: str, what: str, tokens: int) -> list[dict[str, Any]]:
    rows = []
    for (recipe, rate, change), group in groups(entries, kind).items():
        about = {"recipe": recipe, "rate": rate, "change": change, "tokens": tokens}
        for setting in group[0]["decoded"]:
            found = ratio_row(parts(group, setting))
            rows.append({"what": what, **found, "settings": about | {"decoding": setting}})
    return rows


def training_rows(entries: Sequence[Entry], tokens: int) -> list[dict[str, Any]]:
    """Processor time of a step, and how far a peer's logits are from those of the head of ours that decodes for it."""
    rows = []
    for (recipe, rate, change), group in groups(entries, "trained").items():
        about = {"recipe": recipe, "rate": rate, "change": change, "steps": group[0]["steps"], "tokens": tokens}
        value = float(np.mean([entry["seconds_per_step"] for entry in group]))
        told = group[0]["settings"]
        about |= {name: next(told[key] for key in keys if key in told) for name, keys in TOLD.items()}
        rows.append({"what": STEP, "value": value, "count": len(group), "settings": about | group[0]["package"]})
    for (recipe, _, _), group in groups(entries, "final").items():
        if recipe != "ours":
            value = max(entry["difference"] for entry in group)
            about = {"recipe": recipe, "tokens": tokens}
            what = f"{SAME}, largest difference between the peer's code and our head"
            rows.append({"what": what, "value": value, "settings": about, "goal": "<= 0.0001", "met": value <= 1e-4})
    return rows


PAGE = """# Our EAGLE-3 recipe against those of speculators and SpecForge

Made by `{command}` from a finished demo; every number below stands in `docs/studies/peers.json`.
Every head sees the same {tokens:,} tokens in the same steps, from the same target states (three taps, last state), with one layer
of the same sizes, the same draft vocabulary and the target's frozen embedding. Each peer trains with its own package: its own
model class, loss, start, rollout, optimiser and schedule, at its defaults. What a CPU forbids is replaced by its own plain path:
SDPA for FlexAttention, plain losses for Triton's, float32 for bf16 (in Muon too).

The defaults of both are meant for runs a thousand times longer, so each peer is also trained at three other learning rates. The
rate with the most tokens per verify on prompts of *other* held-out rows is its best. Ours is the recipe of `configs/demo.yaml`,
whose start and losses were chosen on those same other rows at seed 0, among about a dozen settings. Of our two validations the
better one's weights are kept, on the same rows; the peers keep their last. **The goal is held against the better peer at its best
rate.** All heads are measured by one decoder, ours, after their logits in it have been found
equal to those of the code that trained them. Chains draft K = 5 tokens; trees have 32 nodes: at T = 0 EAGLE-2's dynamic tree, at
T = 1 one static tree for all, its siblings sampled without replacement. Intervals are 95 %,
{intervals}, both sides paired.

Machine: {machine}. Packages: {packages}. Revisions by which the heads were trained: {revisions}.

## Ours over the better peer

{goals}

At the peers' default rates (seed 0):

{defaults}
{longer}
## Tokens per verify

{taus}

## Choosing the learning rate

On prompts that are not evaluated, seed 0.

{choices}

## Time of an optimiser step

Processor seconds of one thread; ours with its start and its validations. Longer rollouts cost more: that is part of a recipe.

{times}

## What differs

{differences}
{ablations}"""

#: (what, ours, speculators', SpecForge's)
DIFFERENCES = (
    ("start of the layer", "a guess of the target's next state, fitted to the same rows", "random", "random"),
    ("output head", "the target's rows, trained", "the target's rows, frozen", "random, trained"),
    (
        "loss",
        "KL against the target's own probabilities, mass outside the draft's vocabulary is lost; regression to its last state",
        "KL against the target renormalised over the draft's vocabulary",
        "cross-entropy against the same, only where the target's likeliest token is in that vocabulary",
    ),
    ("divided by", "supervised predictions of the step", "those of each rollout step", "all slots, padding too"),
    ("teacher", "64 draws of the cache", "exact, from the last state", "exact, from the last state"),
    ("fused taps", "as they are", "one norm before the fusion", "as they are"),
    ("residual, state fed back", "not normed", "normed", "not normed"),
    ("optimiser, schedule", "Muon and AdamW, linear", "Muon and AdamW, linear", "AdamW, cosine"),
)

LASTING = """
On {tokens:,} tokens, at the rates that were chosen on the shorter runs (seed 0):

{gains}

{taus}
"""

ABLATED = """
## Where the difference comes from

Our recipe (seed 0) as it is, and with the changes that are named:

{table}
"""


def page(study: dict[str, Any]) -> str:
    """docs/peers.md from docs/studies/peers.json."""
    rows = study["rows"]
    times = [row for row in rows if row["what"] == STEP]
    packages = {key: value for row in times for key, value in row["settings"].items() if key not in NOT_PACKAGES}
    trained = [row for row in rows if row["what"] == TAU]
    changed = [row for row in trained if row["settings"]["change"]]
    return PAGE.format(
        command=study["command"],
        tokens=rows[0]["settings"]["tokens"],
        machine=machine(study["environment"]),
        revisions=", ".join(study["revisions"]),
        intervals=study["intervals"],
        packages=", ".join(f"{key} {value}" for key, value in packages.items()),
        goals=gain_table([row for row in rows if row["what"] == GAIN]),
        defaults=gain_table([row for row in rows if row["what"].endswith("at its default rate")]),
        longer=longer_part(rows),
        taus=tau_table([row for row in trained if not row["settings"]["change"]]),
        choices=tau_table([row for row in rows if row["what"] == CHOSEN_BY]),
        times=time_table(times),
        differences=table(("", "Draftsmith", "speculators 0.9.0", "SpecForge 0.2.0"), DIFFERENCES),
        ablations=ABLATED.format(table=tau_table([row for row in rows if row["what"] == ONE_SEED] + changed))
        if changed
        else "",
    )


def longer_part(rows: list[dict[str, Any]]) -> str:
    """What the page says of the chosen recipes on more tokens; nothing where they were not run."""
    found = [row for row in rows if row["what"] == LONGER]
    if not found:
        return ""
    taus = [row for row in rows if row["what"] == f"{TAU}, {LONG}"]
    return LASTING.format(tokens=found[0]["settings"]["tokens"], gains=gain_table(found), taus=tau_table(taus))


NOT_PACKAGES = ("recipe", "rate", "change", "steps", "tokens", *TOLD)


def gain_table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        about = row["settings"]
        value, bounds = f"{row['value']:.3f}", f"{row['low']:.3f} – {row['high']:.3f}"
        peer = f"{about['peer']}, {about['rate']}"
        lines.append((about["decoding"], peer, value, bounds, row.get("goal", ""), met(row)))
    return table(("decoding", "peer, learning rate", "ratio", "95 %", "goal", "met"), lines)


def tau_table(rows: list[dict[str, Any]]) -> str:
    """A line per recipe, rate and change, a column per way of decoding."""
    columns = list(dict.fromkeys(row["settings"]["decoding"] for row in rows))
    lines: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in rows:
        about = row["settings"]
        key = (", ".join(filter(None, (about["recipe"], about["change"]))), about["rate"], str(row["seeds"]))
        lines.setdefault(key, {})[about["decoding"]] = span(row, 3)
    found = [(*key, *(cells.get(name, "–") for name in columns)) for key, cells in lines.items()]
    return table(("recipe", "learning rate", "seeds", *columns), found)


def time_table(rows: list[dict[str, Any]]) -> str:
    """A line per recipe: mean over all its heads; the learning rate is the default."""
    lines = []
    for recipe in dict.fromkeys(row["settings"]["recipe"] for row in rows):
        own = [row for row in rows if row["settings"]["recipe"] == recipe and not row["settings"]["change"]]
        mean = sum(row["value"] for row in own) / len(own)
        about = next((row["settings"] for row in own if row["settings"]["rate"] == "default"), own[0]["settings"])
        lines.append((recipe, *(f"{about[name]:g}" for name in (*TOLD, "steps")), f"{mean:.2f}"))
    return table(("recipe", "rollouts", "decay per rollout step", "learning rate", "steps", "seconds"), lines)
