"""Expected acceptance on held-out text against the target's full distribution: what picks the best checkpoint.

`alpha_teacher_forced` of docs/conventions.md: no decoding, no truncated cache. Knows the target and a few rows of text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from draftsmith.data.batches import Batch, collate_rows
from draftsmith.data.rows import Row
from draftsmith.models.target import Target
from draftsmith.train.losses import acceptance, plain
from draftsmith.train.objectives import Objective
from draftsmith.train.teachers import dense_teacher


@dataclass(frozen=True)
class HeldOut:
    """A few held-out rows with the target's states of them, computed once."""

    target: Target
    batches: list[Batch]

    @classmethod
    def of(cls, target: Target, rows: Sequence[Row], taps: Sequence[int]) -> "HeldOut":
        """Run the target over the rows, one at a time."""
        batches = []
        with torch.no_grad():
            for row in rows:
                batch = collate_rows([row]).to(target.device)
                out = target.forward(batch.token_ids, tuple(taps), want_logits=False)
                batches.append(replace(batch, last=out.last, taps=None if out.taps is None else out.taps.float()))
        return cls(target, batches)

    @torch.no_grad()
    def expected_acceptance(self, objective: Objective) -> list[float]:
        """Mean of Σ_v min(p, q) over the supervised positions, for each rollout step of the objective."""
        training = objective.training
        objective.eval()
        accepted, count = torch.zeros(objective.steps), torch.zeros(objective.steps)
        for batch in self.batches:
            assert batch.last is not None
            for k, (slots, logits) in enumerate(objective.predictions(batch)):
                p = self.target.head(batch.last[objective.teacher_places(slots, k)]).float().softmax(-1)
                p = p[:, objective.vocabulary.target_ids.to(p.device)]
                accepted[k] += plain(acceptance, logits, dense_teacher(p)).sum().cpu()
                count[k] += len(logits)
        objective.train(training)
        return (accepted / count.clamp(min=1)).tolist()

    @torch.no_grad()
    def match(self, objective: Objective) -> float:
        """Share of the supervised positions at which the first step's likeliest token is the target's: what greedy decoding would
        accept there, and what the evaluation holds its own measurement against (`eval/depth_one.py`)."""
        training = objective.training
        objective.eval()
        ids = objective.vocabulary.target_ids
        same = count = 0
        for batch in self.batches:
            assert batch.last is not None
            slots, logits = next(iter(objective.predictions(batch)))
            p = self.target.head(batch.last[objective.teacher_places(slots, 0)])[:, : self.target.usable]
            said = logits.masked_fill((ids >= self.target.usable).to(logits.device), float("-inf")).argmax(-1)
            same += int((ids.to(said.device)[said] == p.argmax(-1)).sum())
            count += len(said)
        objective.train(training)
        return same / max(count, 1)
