"""The rules at run time: whether the next step should speculate. For a server's loop; numbers only, no model, no clock."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any


def reached(entries: Iterable[Mapping[str, Any]], name: str, start: float) -> float | None:
    """How far speculation pays: the largest `name` (temperature, batch) of entries that all `pays`, from `start` on; None if that
    one does not."""
    above = sorted((entry[name], entry["pays"]) for entry in entries if entry[name] >= start)
    return max((value for value, _ in takewhile(lambda pair: pair[1], above)), default=None)


@dataclass
class SpeculationGate:
    """Refuses hot requests and large batches, and falls back to plain decoding while too little is accepted.

    most_temperature, most_batch: above them speculation does not pay (−1 and 0: it never does). break_even: the acceptance rate (Σ
    accepted / Σ drafted over the last `window` verifies) below which a verify costs more than it saves. retry_after: plain steps
    until it is tried again, with an empty window: conditions change, and a window's worth of bad verifies every so many steps is
    what the trial may cost. Everything takes constant time.

        if gate.should_speculate(request.temperature, len(batch)):
            …                                     # draft, verify
            gate.observe(accepted, drafted)
    """

    most_temperature: float
    most_batch: int
    break_even: float
    window: int
    retry_after: int
    _seen: deque[tuple[int, int]] = field(default_factory=deque, repr=False)
    _accepted: int = 0
    _drafted: int = 0
    _plain_left: int = 0

    def __post_init__(self) -> None:
        if self.window < 1 or self.retry_after < 0:
            raise ValueError(f"window {self.window} and retry_after {self.retry_after} must be at least 1 and 0")

    def observe(self, accepted: int, drafted: int) -> None:
        """Count one verify: `accepted` of the `drafted` tokens on its path (a tree's depth) stayed. Nothing drafted: no news."""
        if not 0 <= accepted <= drafted:
            raise ValueError(f"accepted {accepted} of {drafted} drafted tokens")
        if drafted == 0:
            return
        self._seen.append((accepted, drafted))
        self._accepted += accepted
        self._drafted += drafted
        if len(self._seen) > self.window:
            old_accepted, old_drafted = self._seen.popleft()
            self._accepted -= old_accepted
            self._drafted -= old_drafted
        if len(self._seen) == self.window and self.acceptance_rate < self.break_even:
            self._plain_left = self.retry_after
            self._seen.clear()
            self._accepted = self._drafted = 0

    def should_speculate(self, temperature: float = 0.0, batch: int = 1) -> bool:
        """Whether the next step of `batch` sequences should draft. While it has fallen back, each call counts as a plain step."""
        if self._plain_left > 0:
            self._plain_left -= 1
            return False
        return temperature <= self.most_temperature and batch <= self.most_batch

    @property
    def acceptance_rate(self) -> float:
        """Σ accepted / Σ drafted over the window; 1 while nothing was seen."""
        return self._accepted / self._drafted if self._drafted else 1.0
