"""Sums over texts, by seed, and the intervals of what is made of them. Knows no study.

Texts are many, so their share of an interval is bootstrapped. Seeds are few, and a bootstrap over three of them covers 75 % where
it promises 95: their share is Student's t of the spread between seeds, as wide as so few values allow. One seed shows no spread;
its interval is of texts alone, and a comparison at one seed is no verdict.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

RESAMPLES = 4000
#: What a page says of its intervals.
METHOD = "bootstrapped over texts; over seeds Student's t of their spread (one seed: over texts alone)"
Entry = dict[str, Any]
Sums = Mapping[int, np.ndarray]  # seed → [texts, 2]: numerator and denominator of every text


def sums(group: list[Entry], domain: str, place: str, kind: str, columns: tuple[int, int]) -> Sums:
    """The sums of every line of a head or draft, by its seed; domain "all": the texts of all domains."""
    domains = [domain] if domain != "all" or not group else list(group[0][place])
    return {
        int(entry["job"]["seed"]): np.array(
            [[text[c] for c in columns] for name in domains for text in entry[place][name][kind]], dtype=float
        )
        for entry in group
    }


@dataclass(frozen=True)
class Measured:
    """A number over all seeds and texts, in resamples of the texts [RESAMPLES], and with each seed alone [S]."""

    value: float
    texts: np.ndarray
    seeds: np.ndarray

    def row(self, count: int) -> dict[str, Any]:
        """value, low, high (95 %), count: what the value was divided by, seeds."""
        seeds = self.seeds[np.isfinite(self.seeds)]  # without those that nothing was counted of
        few, samples = len(seeds), self.texts
        if few > 1:
            error = seeds.std(ddof=1) / np.sqrt(few)
            samples = samples + error * np.random.default_rng(1).standard_t(few - 1, RESAMPLES)
        low, high = np.nanpercentile(samples, [2.5, 97.5])
        return {"value": self.value, "low": float(low), "high": float(high), "count": count, "seeds": few}


def pooled(found: Sums) -> Measured:
    """Σ numerators / Σ denominators. Numbers of as many texts are resampled alike: what is made of two of them is paired."""
    parts = np.stack([found[seed] for seed in sorted(found)])
    return Measured(
        float(_ratio(parts.sum((0, 1)))), _ratio(_weights(parts.shape[1]) @ parts.sum(0)), _ratio(parts.sum(1))
    )


@cache
def _weights(texts: int) -> np.ndarray:
    """[RESAMPLES, texts]: how often each text is drawn."""
    return np.random.default_rng(0).multinomial(texts, np.full(texts, 1 / texts), size=RESAMPLES).astype(float)


def _ratio(parts: np.ndarray) -> np.ndarray:
    """[…, 2] → […]: NaN where nothing was counted."""
    top, bottom = parts[..., 0], parts[..., 1]
    return np.divide(top, bottom, out=np.full(top.shape, np.nan), where=bottom > 0)


def ratio_row(found: Sums) -> dict[str, Any]:
    return pooled(found).row(_count(found))


def points(a: Sums, b: Sums) -> dict[str, Any]:
    """100 · (ratio of a − ratio of b), paired over texts and the seeds that both have."""
    one, two, count = _paired(a, b)
    return Measured(*(100 * (x - y) for x, y in zip(one, two, strict=True))).row(count)


def gain(ours: Sums, theirs: Sums) -> dict[str, Any]:
    """Ratio of two ratios, paired over texts and the seeds that both have."""
    one, two, count = _paired(ours, theirs)
    return Measured(*(x / y for x, y in zip(one, two, strict=True))).row(count)


def _paired(a: Sums, b: Sums) -> tuple[tuple[Any, ...], tuple[Any, ...], int]:
    """Both numbers (value, texts, seeds) over the seeds that both have, and what the first was divided by."""
    both = a.keys() & b.keys()
    if not both:
        raise ValueError(f"seeds {sorted(a)} and {sorted(b)} have none in common to compare")
    first, second = ({seed: side[seed] for seed in both} for side in (a, b))
    one, two = ((it.value, it.texts, it.seeds) for it in (pooled(first), pooled(second)))
    return one, two, _count(first)


def _count(found: Sums) -> int:
    return int(sum(parts[:, 1].sum() for parts in found.values()))
