"""How fast a draft makes decoding: plain and speculative in turn in one process, and what a draft step and a verify cost.

Knows decoding and the clock; knows nothing of domains or files. On a machine that does other work at the same time the numbers
mean little: the better of two rounds counts for each prompt, which forgives a short disturbance and no long one.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from draftsmith.eval.decode import Decoding, decode
from draftsmith.eval.drafters import Drafter, NoDraft
from draftsmith.eval.metrics import interval, ratio, resampled
from draftsmith.eval.settings import EvalSettings
from draftsmith.models.target import Target

ROUNDS = 2
FEWEST = 2  # prompts that are timed however long they take: one has no interval


class Watched:
    """A drafter with a stopwatch. draft: seconds of each proposal; verify: of the target's forward that follows it."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.draft: list[float] = []
        self.verify: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, *arguments: Any) -> Any:
        started = time.perf_counter()
        proposal = self._drafter.propose(*arguments)
        self._drafted = time.perf_counter()
        self.draft.append(self._drafted - started)
        return proposal

    def observe(self, logits: Any) -> None:
        """Called with the target's logits as soon as they are there."""
        self.verify.append(time.perf_counter() - self._drafted)
        self._drafter.observe(logits)


@dataclass
class Speed:
    """Seconds of each timed prompt [n], of the better round. plain and speculative: per new token; plain_step: of one target
    step of plain decoding; verify: of one target forward over the drafted tokens and the pending one; draft: of one draft step."""

    plain: list[float] = field(default_factory=list)
    speculative: list[float] = field(default_factory=list)
    plain_step: list[float] = field(default_factory=list)
    verify: list[float] = field(default_factory=list)
    draft: list[float] = field(default_factory=list)

    def speedup(self) -> dict[str, Any]:
        """Ratio of the total times per token, plain over speculative."""
        return ratio(np.array(self.plain), np.array(self.speculative)) | {"count": len(self.plain)}

    def metrics(self, tokens: np.ndarray, verifies: np.ndarray, K: int) -> dict[str, Any]:
        """speedup, draft_cost, verify_cost and speedup_predicted = tokens_per_verify / (verify_cost + K · draft_cost), whose
        interval joins those of its parts. tokens, verifies: sums of each decoded prompt, timed or not."""
        plain, verify, draft = (np.array(values) for values in (self.plain_step, self.verify, self.draft))
        weights, timed = resampled(len(tokens), 1), resampled(len(plain), 2)
        faster = (weights @ tokens) / (weights @ verifies)
        slower = (timed @ (verify + K * draft)) / (timed @ plain)
        value = tokens.sum() / verifies.sum() * plain.sum() / (verify + K * draft).sum()
        measured: dict[str, dict[str, Any]] = {
            "speedup": self.speedup(),
            "draft_cost": ratio(draft, plain),
            "verify_cost": ratio(verify, plain),
            "speedup_predicted": interval(value, faster / slower, len(plain)),
        }
        return {name: entry | {"count": len(plain)} for name, entry in measured.items()}


def measured_speed(
    target: Target, drafter: Drafter, texts: Sequence[list[int]], settings: EvalSettings, how: Decoding
) -> Speed:
    """Decode prompts one at a time, plainly and with the drafter in turn, ROUNDS times each.

    Ends after `timed_prompts` prompts, or sooner when `timed_seconds` are over and FEWEST prompts are done.
    """
    speed, begun = Speed(), time.perf_counter()
    for number, text in enumerate(texts[: settings.timed_prompts]):
        if number >= FEWEST and time.perf_counter() - begun > settings.timed_seconds:
            break
        rounds: list[tuple[float, float, float, float, float]] = []
        for _ in range(ROUNDS):
            plain, plain_watch = _timed(target, NoDraft(), text, how, number)
            drafted, watch = _timed(target, drafter, text, how, number)
            step, verify, draft = map(statistics.median, (plain_watch.verify, watch.verify, watch.draft))
            rounds.append((plain, drafted, step, verify, draft / settings.K))
        best = [min(column) for column in zip(*rounds, strict=True)]
        lists = (speed.plain, speed.speculative, speed.plain_step, speed.verify, speed.draft)
        for values, value in zip(lists, best, strict=True):
            values.append(value)
    return speed


def _timed(target: Target, drafter: Drafter, text: list[int], how: Decoding, name: int) -> tuple[float, Watched]:
    """Seconds per new token of one prompt, and of the parts of each step."""
    watched, started = Watched(drafter), time.perf_counter()
    [result] = decode(target, cast(Drafter, watched), [text], how, names=[name])
    return (time.perf_counter() - started) / len(result.tokens), watched
