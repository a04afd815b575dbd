"""Train a small draft on the tokens that a draft of its size can learn (AdaSPEC, arXiv 2510.19779).

The gap of a token is the untrained draft's loss less that of a trained reference draft: what training wins there. Of the supervised
tokens of every batch the share with the largest gaps counts, the others weigh nothing. Costs two forwards without gradient per
batch, of the start and of the reference, on top of the draft's own: about twice the time of a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftsmith.data.batches import Batch, supervised_slots
from draftsmith.models.draft import DraftLM
from draftsmith.train.loop import Source
from draftsmith.train.losses import forward_kl, plain
from draftsmith.train.teachers import AnyTeacher

ROWS_AT_ONCE = 256  # positions whose logits are held at a time


class Selective:
    """A `Source`: the batches of another one, in which a predicted token weighs 1 or 0."""

    def __init__(
        self,
        source: Source,
        start: DraftLM,
        reference: DraftLM,
        share: float,
        teacher: Callable[[Batch, Tensor, int], AnyTeacher],
    ) -> None:
        """teacher: what teaches the slots of a batch (`Objective.cached_teacher`)."""
        self.lengths = source.lengths
        self.identity = getattr(source, "identity", "")  # other rows below are other rows here
        self._source, self._start, self._reference, self._share, self._teacher = (
            source,
            start,
            reference,
            share,
            teacher,
        )

    @torch.no_grad()
    def batch(self, indices: Sequence[int]) -> Batch:
        """Rows `indices` with weights: 1 for the share of supervised predictions with the largest gaps (at least one)."""
        batch = self._source.batch(indices)
        slots = supervised_slots(batch.supervised, batch.lengths, 1)
        weights = torch.zeros(batch.supervised.shape)
        count = int(slots.sum())
        if count:
            gap = self._losses(self._start, batch, slots) - self._losses(self._reference, batch, slots)
            kept = torch.zeros(count)
            kept[gap.topk(max(1, round(self._share * count))).indices] = 1.0
            rows, columns = slots.nonzero(as_tuple=True)
            weights[rows, columns + 1] = kept  # slot t predicts token t + 1, whose weight it is
        return replace(batch, weights=weights)

    def _losses(self, draft: DraftLM, batch: Batch, slots: Tensor) -> Tensor:
        """Forward KL [N] at the trained slots."""
        states = draft.forward(batch.token_ids.to(draft.device), want_logits=False).last[slots.to(draft.device)]
        teacher = self._teacher(batch.to(draft.device), slots.to(draft.device), 0)
        values = []
        for first in range(0, len(states), ROWS_AT_ONCE):
            chunk = slice(first, first + ROWS_AT_ONCE)
            values.append(plain(forward_kl, draft.head(states[chunk]), teacher[chunk]).cpu())
        return torch.cat(values)
