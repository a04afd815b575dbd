"""From what `benchmarks/cache.py` measured to the rows of docs/studies/cache.json, and from these rows to docs/cache.md."""

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from markdown import machine, met, table

RESAMPLES = 2000
BYTES_GOAL, LOSS_GOAL = 0.25, 0.99


class Study:
    """Rows of the study, each one number."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def _add(self, what: str, numbers: dict[str, Any], goal: str = "", **settings: Any) -> None:
        row: dict[str, Any] = {"what": what, **numbers, "settings": settings}
        if goal:
            sign, bar = goal.split()
            row |= {
                "goal": goal,
                "met": numbers["value"] <= float(bar) if sign == "<=" else numbers["value"] >= float(bar),
            }
        self.rows.append(row)

    def add_bytes(self, target: str, width: int, found: dict[str, dict[str, Any]], goal: list[str]) -> None:
        """Size, speed and KL of each cache of one target."""
        others = 4 * 2 * width  # three taps and the last state in bf16: what other projects store
        ours = found["bf16, topk 64"]["bytes_per_token"]
        for cache, numbers in found.items():
            about = {"target": target, "width": width, "cache": cache}
            count = numbers["count"]
            for what in ("bytes_per_token", "kept_mass", "kl_of_rebuilt_logits", *RATES):
                self._add(what, {"value": numbers[what], "count": count}, **about)
            small = f"<= {BYTES_GOAL}" if cache in goal else ""
            ratio = numbers["bytes_per_token"] / others
            self._add("bytes over three taps and last state in bf16", {"value": ratio}, small, **about)
            self._add("bytes over bf16 taps and topk 64", {"value": numbers["bytes_per_token"] / ours}, **about)

    def add_drafts(
        self, draft: str, tokens: int, runs: dict[str, list[dict[str, Any]]], exact: str, goal: list[str]
    ) -> None:
        """Acceptance of the drafts of each cache, alone and over those of the exact cache; runs[cache]: one entry per seed."""
        for cache, seeds in runs.items():
            prompts = len(next(iter(seeds[0]["decoded"].values())))
            about = {"draft": draft, "cache": cache, "tokens": tokens, "prompts": prompts}
            self._add("alpha_teacher_forced", spread([run["alpha_teacher_forced"] for run in seeds]), **about)
            expected = [run["expected_tokens_per_verify"] for run in seeds]
            self._add("expected_tokens_per_verify", spread(expected), **about)
            if cache != exact:
                small = f">= {LOSS_GOAL}" if cache in goal else ""
                ratios = [a / b["expected_tokens_per_verify"] for a, b in zip(expected, runs[exact], strict=True)]
                self._add("expected_tokens_per_verify over the exact cache", spread(ratios), small, **about)
            for temperature in seeds[0]["decoded"]:
                sums, base = (decoded(side, temperature) for side in (seeds, runs[exact]))
                at = about | {"temperature": float(temperature), "K": 5, "tree": "chain"}
                small = f">= {LOSS_GOAL}" if cache in goal else ""
                self._add("tokens_per_verify", interval(sums[..., 0], sums[..., 1]), **at)
                self._add("alpha", interval(sums[..., 2], sums[..., 3]), **at)
                for what, over, under, bar in (("tokens_per_verify", 0, 1, small), ("alpha", 2, 3, "")):
                    if cache != exact:
                        pair = [sums[..., over], sums[..., under], base[..., over], base[..., under]]
                        self._add(f"{what} over the exact cache", interval(*pair), bar, **at)


RATES = ("write_mb_per_second", "read_mb_per_second", "write_tokens_per_second", "read_tokens_per_second")


def spread(values: list[float]) -> dict[str, float | int]:
    """Mean and range over the seeds."""
    return {"value": float(np.mean(values)), "low": min(values), "high": max(values), "count": len(values)}


def decoded(seeds: list[dict[str, Any]], temperature: str) -> np.ndarray:
    """[seeds, prompts, 4]: emitted, verifies, Σ of acceptance probabilities, positions reached."""
    return np.array([run["decoded"][temperature] for run in seeds], dtype=float)


def interval(*sums: np.ndarray) -> dict[str, float | int]:
    """Σ a / Σ b, or (Σ a / Σ b) / (Σ c / Σ d), of sums [seeds, prompts]; 95 % bootstrap interval over both at once.

    The same seeds and prompts are drawn for all sums: differences between prompts and between seeds cancel in a ratio of ratios.
    """

    def ratio(picked: list[np.ndarray]) -> float:
        a, b, *base = (float(values.sum()) for values in picked)
        return a / b if not base else a / b / (base[0] / base[1])

    rng = np.random.default_rng(0)
    seeds, prompts = sums[0].shape
    samples = []
    for _ in range(RESAMPLES):
        chosen = np.ix_(rng.integers(seeds, size=seeds), rng.integers(prompts, size=prompts))
        samples.append(ratio([values[chosen] for values in sums]))
    low, high = np.percentile(samples, [2.5, 97.5])
    return {"value": ratio(list(sums)), "low": float(low), "high": float(high), "count": int(sums[1].sum())}


PAGE = """# What a cache may leave out

Made by `make bench-cache`; all numbers, with their counts, are in `docs/studies/cache.json`.

A cache is named by its state codec and its distribution codec. `fp32, from_last` is exact: nothing of the distribution is
left out, it is computed again from the last state. `topk 64` keeps the 64 likeliest tokens with true log-probabilities,
`topk8 32` the 32 likeliest with log-probabilities in a byte (steps are fine where mass is; the kept mass itself is exact),
`sampled 32` is 32 systematic draws, an unbiased estimate of the whole distribution (its kept mass is that of the tokens
met). `int8` and `int4` states are turned by a fixed rotation first.

Drafts are trained on the first {tokens:,} tokens of the demo's rows, seen once, with the same {seeds} seeds for every cache,
and decode the same {prompts} held-out prompts in chains of K = 5. τ is tokens per verify, pooled over prompts and seeds;
`τ / exact` is its ratio to the drafts of the exact cache with the same seeds on the same prompts, with a 95 % interval
bootstrapped over seeds and prompts. α is the expected acceptance over held-out text against the full distribution at T = 1, the
mean over the seeds; `expected τ` is what it comes to without decoding, 1 + Σ_k Π_(i ≤ k) α_i over the rollout steps that the
head was trained for (a draft LM: one), relative to the exact cache, with its range over the seeds: far more precise than
decoding a few prompts, and what the goal is judged by first. A draft LM reads no states, so caches with the same distribution
share its numbers.

Machine: {machine}.

## Drafts

{drafts}

## Bytes, speed, and what is left of the logits

Bytes are per token, with one token's id and mask; the caches with `from_last` hold the last state besides three taps. *Of
bf16* is relative to three taps and the last state in bf16, which is what other projects store; *of ours* to our own default
(bf16 taps and `topk 64`). Writing is encoding and saving, one thread, without the target's forward pass; reading is rows in
random order from a mapped file into padded batches. MB are those on disk. KL, in nats per token, is that of the logits
rebuilt from the last state in that codec against the target's. The wide target has random weights, whose states have no
outliers.

{bytes}

## Goals

{goals}

fp8 takes 0.375 of the bf16 bytes for its taps alone: it cannot reach a quarter at any width. The states cost nothing that can
be measured here, int4 included; what costs is the distribution. At width 1024 a quarter leaves room for 96 draws; at width 256
for 22 draws or 32 tokens only, and on a target as flat as the demo's that is too few.
"""


def page(study: dict[str, Any]) -> str:
    """docs/cache.md from docs/studies/cache.json, where the exact cache comes first."""
    rows, found = study["rows"], Tables(study["rows"])
    caches = list(dict.fromkeys(row["settings"]["cache"] for row in rows if "draft" in row["settings"]))
    exact = found.find("alpha_teacher_forced", draft="eagle", cache=caches[0])
    return PAGE.format(
        tokens=exact["settings"]["tokens"],
        seeds=exact["count"],
        prompts=exact["settings"]["prompts"],
        machine=machine(study["environment"]),
        drafts="\n\n".join(found.drafts(draft, caches) for draft in ("eagle", "draft-lm")),
        bytes="\n\n".join(found.sizes(target, caches) for target in ("demo", "wide")),
        goals=found.goals(),
    )


class Tables:
    """Markdown from rows."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def find(self, what: str, **settings: Any) -> dict[str, Any]:
        """The row of that name whose settings include these; an empty one if there is none."""
        for row in self.rows:
            if row["what"] == what and settings.items() <= row["settings"].items():
                return row
        return {}

    def drafts(self, draft: str, caches: list[str]) -> str:
        lines = []
        for cache in caches:
            cells = [cache, _number(self.find("alpha_teacher_forced", draft=draft, cache=cache), 4)]
            over = self.find("expected_tokens_per_verify over the exact cache", draft=draft, cache=cache)
            cells.append(_number(over, 4, bounds=True))
            for temperature in (0.0, 1.0):
                at = {"draft": draft, "cache": cache, "temperature": temperature}
                cells.append(_number(self.find("tokens_per_verify", **at), 3))
                cells.append(_number(self.find("tokens_per_verify over the exact cache", **at), 3, bounds=True))
            lines.append(cells)
        heads = ("α", "expected τ / exact", "τ at T = 0", "τ / exact", "τ at T = 1", "τ / exact")
        return table((f"{NAMES[draft]} trained on", *heads), lines)

    def sizes(self, target: str, caches: list[str]) -> str:
        width = self.find("bytes_per_token", target=target)["settings"]["width"]
        lines = []
        for cache in caches:
            at = {"target": target, "cache": cache}
            cells = [
                self.find("bytes_per_token", **at),
                self.find("bytes over three taps and last state in bf16", **at),
                self.find("bytes over bf16 taps and topk 64", **at),
                self.find("kept_mass", **at),
                *(self.find(rate, **at) for rate in RATES),
            ]
            numbers = map(_number, cells, (0, 3, 3, 3, 0, 0, 0, 0))
            lines.append((cache, *numbers, f"{self.find('kl_of_rebuilt_logits', **at)['value']:.1e}"))
        heads = "bytes, of bf16, of ours, kept mass, write MB/s, read MB/s, write tokens/s, read tokens/s, KL"
        return table((f"{target} target, width {width}", *heads.split(", ")), lines)

    def goals(self) -> str:
        lines = []
        for row in self.rows:
            if "goal" in row:
                setting = ", ".join(f"{key} {value}" for key, value in row["settings"].items())
                bounds = f"{row['low']:.3f} – {row['high']:.3f}" if "low" in row else ""
                lines.append((row["what"], setting, f"{row['value']:.3f}", bounds, row["goal"], met(row)))
        return table(("what", "setting", "value", "95 %", "goal", "met"), lines)


NAMES = {"eagle": "EAGLE head", "draft-lm": "draft LM"}


def _number(row: dict[str, Any], digits: int, bounds: bool = False) -> str:
    if not row:
        return ""
    text = f"{row['value']:,.{digits}f}"
    return f"{text} ({row['low']:.{digits}f} – {row['high']:.{digits}f})" if bounds else text
