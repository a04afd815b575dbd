"""Two results of the same kind, one against the other: differences with intervals, paired by prompt where that is possible.

Knows the JSON of eval-acceptance (docs/conventions.md); decodes nothing and judges no threshold.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftsmith.eval.metrics import resampled

METRICS = ("tokens_per_verify", "alpha")


@dataclass(frozen=True)
class Difference:
    """after − before of one metric in one setting, with its 95 % interval. paired: the same prompts were decoded on both sides."""

    domain: str
    temperature: float
    drafting: str
    K: int
    metric: str
    before: float
    after: float
    low: float
    high: float
    paired: bool

    @property
    def worse(self) -> bool:
        """Whether it is lower than before by more than chance: the whole interval is below 0."""
        return self.high < 0.0

    def __str__(self) -> str:
        said = f"{self.metric} {self.before:.3f} → {self.after:.3f}, difference {self.after - self.before:+.3f}"
        how = "paired" if self.paired else "other prompts"
        where = f"{self.domain} at T = {self.temperature:g}, {self.drafting} drafting, K = {self.K}"
        return f"{where}: {said} ({self.low:+.3f} to {self.high:+.3f}, {how})"


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[Difference]:
    """The differences of all settings that both results have. Prompts count as the same when both results list them alike."""
    known = {_setting(entry): entry for entry in before["results"]}
    found = []
    for entry in after["results"]:
        if (old := known.get(_setting(entry))) is None:
            continue
        domain = entry["domain"]
        prompts = [document.get("prompts", {}).get(domain) for document in (before, after)]
        same = prompts[0] is not None and prompts[0] == prompts[1] and "per_prompt" in old
        found += list(_differences(old, entry, same))
    return found


def _setting(entry: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(entry.get(name) for name in ("domain", "temperature", "drafting", "K", "tree"))


def _differences(before: dict[str, Any], after: dict[str, Any], paired: bool) -> Iterator[Difference]:
    for metric in METRICS:
        if not before.get(metric) or not after.get(metric):
            continue
        values = before[metric]["value"], after[metric]["value"]
        if paired:
            weights = resampled(len(before["per_prompt"]["verifies"]))
            old, new = (_resampled(entry, metric, weights) for entry in (before, after))
            low, high = np.nanpercentile(new - old, [2.5, 97.5])
        else:  # two independent numbers: their errors add in squares
            half = np.hypot(*((entry[metric]["high"] - entry[metric]["low"]) / 2 for entry in (before, after)))
            low, high = values[1] - values[0] - half, values[1] - values[0] + half
        where = (after["domain"], after["temperature"], after["drafting"], after["K"])
        yield Difference(*where, metric, *values, float(low), float(high), paired)


def _resampled(entry: dict[str, Any], metric: str, weights: np.ndarray) -> np.ndarray:
    """The metric in each bootstrap sample; NaN where nothing was counted in it. weights [samples, prompts]."""
    sums = entry["per_prompt"]
    if metric == "tokens_per_verify":
        above, below = np.array(sums["tokens"], dtype=float), np.array(sums["verifies"], dtype=float)
    else:
        above, below = np.array(sums["overlap_at"]).sum(1), np.array(sums["reached"], dtype=float).sum(1)
    counted = weights @ below
    return np.divide(weights @ above, counted, where=counted > 0, out=np.full(len(weights), np.nan))
