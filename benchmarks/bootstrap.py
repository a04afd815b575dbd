"""Sums over texts and seeds, and the intervals of what is made of them. Knows no study."""

from typing import Any

import numpy as np

RESAMPLES = 1000
Entry = dict[str, Any]


def sums(group: list[Entry], domain: str, place: str, kind: str, columns: tuple[int, int]) -> np.ndarray:
    """[seeds, texts, 2]: numerator and denominator of every text; domain "all": the texts of all domains."""
    domains = list(group[0][place]) if domain == "all" else [domain]
    return np.array(
        [[[text[c] for c in columns] for name in domains for text in entry[place][name][kind]] for entry in group]
    )


def resampled(parts: np.ndarray) -> tuple[float, np.ndarray]:
    """Σ numerators / Σ denominators of parts [S, R, 2], and the same of 1000 resamples of seeds and, crossed with them, texts.

    Two arrays of one shape are resampled alike, so that differences are paired.
    """
    rng = np.random.default_rng(0)
    seeds, texts = (rng.multinomial(n, np.full(n, 1 / n), size=RESAMPLES).astype(float) for n in parts.shape[:2])
    top, bottom = np.einsum("bs,bt,stc->cb", seeds, texts, parts)
    total = parts.sum((0, 1))
    return float(total[0] / total[1]), np.divide(top, bottom, out=np.full(RESAMPLES, np.nan), where=bottom > 0)


def interval(value: float, samples: np.ndarray, count: int) -> dict[str, Any]:
    low, high = np.nanpercentile(samples, [2.5, 97.5])
    return {"value": value, "low": float(low), "high": float(high), "count": count}


def ratio_row(parts: np.ndarray) -> dict[str, Any]:
    return interval(*resampled(parts), int(parts[..., 1].sum()))


def points(a: np.ndarray, b: np.ndarray) -> dict[str, Any]:
    """100 · (ratio of a − ratio of b), paired over seeds and texts. A side with one seed stands against every seed of the other."""
    shape = np.broadcast_shapes(a.shape, b.shape)
    (first, one), (second, two) = (resampled(np.broadcast_to(parts, shape)) for parts in (a, b))
    return interval(100 * (first - second), 100 * (one - two), int(a[..., 1].sum()))


def gain(ours: np.ndarray, theirs: np.ndarray) -> dict[str, Any]:
    """Ratio of two ratios, paired over seeds and prompts. A side with fewer seeds stands against the other's first ones."""
    seeds = min(len(ours), len(theirs))
    (first, one), (second, two) = (resampled(side[:seeds]) for side in (ours, theirs))
    return interval(first / second, one / two, int(ours[:seeds, :, 1].sum()))
