"""What is minimised: from a batch to a sum of weighted per-position losses, for each kind of draft.

An objective knows which slots are trained, which teacher each has and what it weighs; the loop divides and steps.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftsmith.data.batches import Batch, Sampled, supervised_slots
from draftsmith.errors import UserError
from draftsmith.models.draft import DraftLM
from draftsmith.models.eagle import EagleHead
from draftsmith.models.vocabulary import DraftVocabulary
from draftsmith.train.fused import head_loss, recomputed_loss
from draftsmith.train.losses import Loss
from draftsmith.train.rollout import rollout
from draftsmith.train.teachers import AnyTeacher, LastTeacher, Teacher

FORWARD_KL = Loss()


@dataclass(frozen=True)
class Sums:
    """Sums over a micro-batch. loss: weighted, with gradient; accepted and count [K]: per rollout step, without gradient."""

    loss: Tensor
    accepted: Tensor
    count: Tensor


class Objective(nn.Module):
    """A draft under training. At rollout step k slot t predicts x_{t+lead+k}; its teacher is p_{t+lead+k−1}, its weight decay^k
    times what the batch gives to that token.

    target_head: last states [n, W] → logits [n, V] of the frozen target, for batches whose teacher is recomputed from `last`.
    """

    lead: int
    steps = 1
    decay = 1.0
    vocabulary: DraftVocabulary

    def __init__(self, loss: Loss, target_head: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.loss = loss
        self.target_head = target_head

    def states(self, batch: Batch) -> Iterator[Tensor]:
        """The draft's states [B, T, H] of every rollout step."""
        raise NotImplementedError

    def logits(self, states: Tensor) -> Tensor:
        """States [N, H] → draft logits [N, V_d]."""
        raise NotImplementedError

    def head(self) -> tuple[Callable[[Tensor], Tensor], Tensor] | None:
        """(f, W) if logits(states) = f(states) · Wᵀ, so that head and loss can be fused; None otherwise."""
        return None

    def trained_slots(self, batch: Batch, k: int) -> Tensor:
        """bool [B, T]: the slots with a supervised prediction at rollout step k."""
        return supervised_slots(batch.supervised, batch.lengths, self.lead + k)

    def teacher_places(self, slots: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(rows [N], positions [N]) of the distributions that teach the slots of step k."""
        rows, columns = slots.nonzero(as_tuple=True)
        return rows, columns + self.lead + k - 1

    def position_weights(self, batch: Batch, slots: Tensor, k: int) -> Tensor | None:
        """What the batch says that each prediction [N] of step k counts; None: 1 each."""
        if batch.weights is None:
            return None
        rows, positions = self.teacher_places(slots, k)
        return batch.weights[rows, positions + 1]

    def weight(self, batch: Batch) -> float:
        """Σ of the weights of a batch's supervised predictions: what `Sums.loss` is to be divided by."""
        total = 0.0
        for k in range(self.steps):
            slots = self.trained_slots(batch, k)
            weights = self.position_weights(batch, slots, k)
            total += self.decay**k * float(slots.sum() if weights is None else weights.sum())
        return total

    def predictions(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """Per rollout step: the trained slots [B, T] and the draft logits [N, V_d] there; the head runs on no other slot."""
        for k, states in enumerate(self.states(batch)):
            slots = self.trained_slots(batch, k)
            yield slots, self.logits(states[slots])

    def forward(self, batch: Batch) -> Sums:
        loss = torch.zeros((), device=batch.token_ids.device)
        accepted, count = [], []
        for k, states in enumerate(self.states(batch)):
            slots = self.trained_slots(batch, k)
            value, reached = self.head_loss(
                states[slots], self.cached_teacher(batch, slots, k), self.position_weights(batch, slots, k)
            )
            loss = loss + self.decay**k * value
            accepted.append(reached)
            count.append(slots.sum().float())
        return Sums(loss, torch.stack(accepted), torch.stack(count))

    def head_loss(self, states: Tensor, teacher: AnyTeacher, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Σ of weights [N] · loss and, without weights and gradient, Σ of the expected acceptance over states [N, H]."""
        if (head := self.head()) is not None:
            before, weight = head
            return head_loss(before(states), weight, teacher, self.loss, self.loss.temperature, weights)
        return recomputed_loss(
            states, self.logits, self.vocabulary.size, teacher, self.loss, self.loss.temperature, weights
        )

    def cached_teacher(self, batch: Batch, slots: Tensor, k: int) -> AnyTeacher:
        """What the target says where the slots of step k predict: listed, drawn, or recomputed from its last states."""
        places = self.teacher_places(slots, k)
        tokens = None
        if self.loss.needs_tokens:
            tokens = self.vocabulary.to_draft(batch.token_ids[places[0], places[1] + 1])
        if batch.teacher is None:
            if batch.last is None or self.target_head is None:
                raise UserError("the cache holds no distribution: cache it again with cache.k above 0")
            return LastTeacher(batch.last[places], self.target_head, self.vocabulary, tokens)
        ids, log_probs = batch.teacher.ids[places], batch.teacher.log_probs[places]
        weight = batch.teacher.weights[places] if isinstance(batch.teacher, Sampled) else None
        complete = weight is None and ids.shape[-1] == self.vocabulary.target_size
        if self.loss.temperature != 1.0 and not complete:
            raise UserError(
                f"temperature {self.loss.temperature}: needs the target's whole distribution, and the cache keeps a part; "
                "set cache.distribution=from_last, or temperature=1"
            )
        known = torch.where(ids >= 0, self.vocabulary.to_draft(ids.clamp(min=0)), -1)
        return Teacher(known, log_probs.exp(), weight, tokens)


class DraftLMObjective(Objective):
    """A draft LM: slot t predicts x_{t+1}."""

    lead = 1

    def __init__(
        self, draft: DraftLM, loss: Loss = FORWARD_KL, target_head: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__(loss, target_head)
        self.model = draft.model
        self.vocabulary = DraftVocabulary.all_of(draft.vocabulary)
        self._draft = draft

    def states(self, batch: Batch) -> Iterator[Tensor]:
        yield self._draft.forward(batch.token_ids, want_logits=False).last

    def logits(self, states: Tensor) -> Tensor:
        return self._draft.head(states)

    def head(self) -> tuple[Callable[[Tensor], Tensor], Tensor] | None:
        weight = self._draft.plain_head
        return None if weight is None else (lambda states: states, weight)


class EagleObjective(Objective):
    """An EAGLE head under training-time test: slot t at rollout step k predicts x_{t+2+k}."""

    lead = 2

    def __init__(
        self,
        head: EagleHead,
        steps: int,
        decay: float = 1.0,
        loss: Loss = FORWARD_KL,
        target_head: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(loss, target_head)
        if steps < 1:
            raise UserError(f"eagle.rollouts {steps}: must be at least 1 (1 is training without rollouts)")
        self.eagle = head
        self.vocabulary = head.vocabulary
        self.steps, self.decay = steps, decay

    def states(self, batch: Batch) -> Iterator[Tensor]:
        if batch.taps is None:
            raise UserError("the cache holds no taps: cache it again with cache.taps set")
        return rollout(self.eagle, batch.token_ids, batch.taps, self.steps)

    def logits(self, states: Tensor) -> Tensor:
        return self.eagle.logits(states)

    def head(self) -> tuple[Callable[[Tensor], Tensor], Tensor] | None:
        own = self.eagle.lm_head
        return None if own is None else (self.eagle.normed, own.weight)
