"""From the lines of the distillation study to its rows with intervals, and from these to docs/distillation.md.

Knows the study's numbers; runs no model.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from bootstrap import Entry, points, pooled, ratio_row, sums
from markdown import machine, met, span, table

GOAL = 5.0  # points of α that the default recipe is to win over hard cross-entropy
FORCED, DECODED, TOKENS = "alpha_teacher_forced", "alpha", "tokens_per_verify"
#: what is reported: (name, where its sums stand in a line, kind, the columns of numerator and denominator)
METRICS = [
    *((FORCED, "forced", kind, (0, 1)) for kind in ("0", "1")),
    *((DECODED, "decoded", kind, (0, 1)) for kind in ("0", "1")),
    *((TOKENS, "decoded", kind, (2, 3)) for kind in ("0", "1")),
]
Group = tuple[str, str, str, int]  # loss, size, teacher, tokens


def grouped(entries: Iterable[Entry]) -> dict[Group, list[Entry]]:
    """The lines of each combination, by seed."""
    found: dict[Group, list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: int(entry["job"]["seed"])):
        job = entry["job"]
        found.setdefault((job["loss"], job["size"], job["teacher"], job["tokens"]), []).append(entry)
    return found


def study_rows(entries: list[Entry], default: tuple[str, str], teacher: str, tokens: int) -> list[dict[str, Any]]:
    """All rows of docs/studies/distill.json that come from trained drafts. default: the recipe's loss and teacher; teacher: the one
    with which all losses were tried."""
    groups, rows = grouped(entries), []
    for (loss, size, teaches, seen), group in groups.items():
        about = {"loss": loss, "size": size, "teacher": teaches, "tokens": seen, "seeds": len(group)}
        about["parameters"] = group[0]["parameters"]
        for name, place, kind, columns in METRICS:
            for domain in (*group[0][place], "all"):
                measured = ratio_row(sums(group, domain, place, kind, columns))
                rows.append(
                    {"what": name, **measured, "settings": about | {"domain": domain, "temperature": float(kind)}}
                )
    return differences(groups, default, teacher, tokens) + rows


def differences(
    groups: dict[Group, list[Entry]], recipe: tuple[str, str], teacher: str, tokens: int
) -> list[dict[str, Any]]:
    """The goal, and what is to be read beside it: the other domains, the start, the best loss, and what may limit the gain."""
    size, rows = "two blocks", []
    loss, taught = recipe
    default: Group = (loss, size, taught, tokens)
    same, hard = (loss, size, teacher, tokens), ("cross_entropy", size, teacher, tokens)  # CE reads no teacher

    def add(what: str, a: Group, b: Group, domain: str, kind: str = "1", goal: float | None = None) -> None:
        if a in groups and b in groups:
            first, second = (sums(groups[group], domain, "forced", kind, (0, 1)) for group in (a, b))
            if not b[3]:  # trained on nothing: the same draft for every seed
                second = dict.fromkeys(first, *second.values())
            found = points(first, second)
            about = {"domain": domain, "loss": a[0], "size": a[1], "teacher": a[2], "tokens": a[3]}
            row = {"what": what, **found, "settings": about}
            rows.append(row | ({} if goal is None else {"goal": f">= {goal}", "met": found["value"] >= goal}))

    gain = "default recipe less hard cross-entropy, points of alpha at T = 1"
    add(gain, default, hard, "code", goal=GOAL)
    for domain in ("prose", "chat", "all"):
        add(gain, default, hard, domain)
    start: Group = ("untrained", size, teacher, 0)
    add("default recipe less the untrained start, points of alpha at T = 1", default, start, "code")
    rivals = [group for group in groups if group[1:] == same[1:] and group != same]
    if same in groups and rivals:
        best = max(rivals, key=lambda group: pooled(sums(groups[group], "all", "forced", "1", (0, 1))).value)
        add(f"best other loss less {loss}, points of alpha at T = 1", best, same, "all")
    for other in dict.fromkeys(group[2] for group in groups if group[2] != taught):
        what = f"teacher {other} less the default {taught}, points of alpha at T = 1"
        add(what, (loss, size, other, tokens), default, "all")
    for kind, said in (("1 sure", "below"), ("1 unsure", "of at least")):
        add(f"limit, target: {gain} where the target's entropy is {said} 1 nat", default, hard, "code", kind)
    for what, of_size, seen in (
        ("a smaller draft", "one block", tokens),
        ("a larger draft", "three blocks", tokens),
        ("four times the tokens", size, 4 * tokens),
    ):
        pair = ((name, of_size, teacher, seen) for name in (loss, "cross_entropy"))
        label = f"limit, {'data' if seen > tokens else 'capacity'}: {loss} less hard cross-entropy, points of alpha at T = 1"
        add(f"{label}, {what}", *pair, "code")
    return rows


PAGE = """# Distilling a draft LM: which loss, draft and teacher

Made by `{command}` from a finished demo; every number below stands in `docs/studies/distill.json`, more of them there.
Each draft sees the same tokens in an order that its seed gives. `alpha_teacher_forced` is the mean of Σ min(p, q) over held-out
positions against the target's *whole* distribution at T = 1, and the match rate of the likeliest tokens at T = 0;
`tokens_per_verify` is decoded, chains of K = 5. Intervals are 95 %, {intervals}.
`cross_entropy` learns the text's own tokens and needs no target: it is the baseline.

Machine: {machine}.

## What the default recipe is worth

The default is `{default}`. {choice} The full teacher needs the target's last state in the cache, 2 bytes a number in bf16
(8 kB a token at width 4096); 64 draws take 320 bytes at any width, less than the 384 of the 64 likeliest tokens. Where the
disk allows it, `cache.distribution: from_last` is the better choice.

{goals}

## Loss and draft size (teacher {teacher})

{losses}

## Teacher

{teachers}

## Failure modes

α, tokens per verify and speed over plain decoding of the demo's distilled draft, by temperature. A *sampled* draft draws from
q, a *greedy* one takes its likeliest token. The heavy twin computes the demo target's function at twelve times its cost.
{slower}

{failures}
"""


def page(study: dict[str, Any]) -> str:
    """docs/distillation.md from docs/studies/distill.json."""
    rows = study["rows"]
    gains = [row for row in rows if row["what"].endswith("T = 1") or row["what"].startswith("limit")]
    trained = [row for row in rows if row["what"] in (FORCED, DECODED, TOKENS)]
    teacher = next((row["settings"]["teacher"] for row in trained), "")
    base = [row for row in trained if row["settings"]["teacher"] == teacher]
    compared = {row["settings"]["loss"] for row in trained if row["settings"]["teacher"] != teacher}
    others = [row for row in trained if row["settings"]["loss"] in compared and row["settings"]["size"] == "two blocks"]
    failures = [row for row in rows if row["what"].startswith("failure mode")]
    slow = [row for row in failures if "speed-up" in row["what"] and row["value"] < 1.0]
    return PAGE.format(
        command=study["command"],
        machine=machine(study["environment"]),
        intervals=study["intervals"],
        choice=choice(gains),
        default="{loss} with teacher {teacher}".format(**gains[0]["settings"]) if gains else "",
        goals=goal_table(gains),
        teacher=teacher,
        losses=pivot(base, ("size", "loss", "tokens")),
        teachers=pivot(others, ("loss", "teacher", "tokens")) if compared else "Not compared in this run.",
        slower=f"**Slower than plain decoding in {len(slow)} of {sum('speed-up' in row['what'] for row in failures)} settings.**",
        failures=pivot(failures, ("drafting", "temperature")),
    )


def choice(gains: list[dict[str, Any]]) -> str:
    """Whether the measurements bear the default loss and teacher out."""
    rivals = [row for row in gains if row["what"].startswith(("best other loss", "teacher "))]
    better = [f"{row['settings']['loss']} ({row['what'].partition(' less')[0]})" for row in rivals if row["low"] > 0.0]
    if better:
        return f"Better than it, with the whole interval above 0: {', '.join(better)}."
    return "No other loss and no other teacher is better with its whole interval above 0."


def goal_table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        about = row["settings"]
        setting = f"{about['loss']}, {about['teacher']}, {about['size']}, {about['tokens']:,}"
        value, bounds = f"{row['value']:.1f}", f"{row['low']:.1f} – {row['high']:.1f}"
        lines.append((row["what"], about["domain"], setting, value, bounds, row.get("goal", ""), met(row)))
    return table(("what", "on", "loss, teacher, size, tokens", "points", "95 %", "goal", "met"), lines)


def pivot(rows: list[dict[str, Any]], keys: tuple[str, ...]) -> str:
    """A table with a line per setting of `keys` and a column per metric, domain and, where no key, temperature."""
    columns: dict[str, None] = {}
    lines: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in rows:
        about = row["settings"]
        at = "" if "temperature" in keys else f" T = {about['temperature']:g}"
        column = f"{row['what'].removeprefix('failure mode: ')}{at}, {about['domain']}"
        columns[column] = None
        lines.setdefault(tuple(about[key] for key in keys), {})[column] = span(row)
    shown = [name for name in columns if name.endswith(", all")] or list(columns)
    shown += [name for name in columns if name.startswith(f"{FORCED} T = 1") and name not in shown]
    found = []
    for key, cells in lines.items():
        start = (f"{part:g}" if isinstance(part, float) else str(part) for part in key)
        found.append([*start, *(cells.get(name, "–") for name in shown)])
    return table((*keys, *shown), found)
