"""What is minimised: from a batch to a sum of weighted per-position losses, for each kind of draft.

An objective knows which slots are trained, which teacher each has and what it weighs; the loop divides and steps.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.data.batches import Batch, Sampled, supervised_slots
from draftsmith.errors import UserError
from draftsmith.models.draft import DraftLM
from draftsmith.models.eagle import EagleHead
from draftsmith.models.medusa import MedusaHeads
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
    survival = False  # whether a step's predictions weigh as much as their chain is expected to reach them
    vocabulary: DraftVocabulary

    def __init__(self, loss: Loss, target_head: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.loss = loss
        self.target_head = target_head

    def states(self, batch: Batch) -> Iterator[Tensor]:
        """The draft's states [B, T, H] of every rollout step."""
        raise NotImplementedError

    def logits(self, states: Tensor, k: int) -> Tensor:
        """States [N, H] of step k → draft logits [N, V_d]."""
        raise NotImplementedError

    def head(self, k: int) -> tuple[Callable[[Tensor], Tensor], Tensor] | None:
        """(f, W) if logits(states, k) = f(states) · Wᵀ, so that head and loss can be fused; None otherwise."""
        return None

    def beside(self, batch: Batch, slots: Tensor, k: int, states: Tensor, accepted: Tensor) -> Tensor | None:
        """What is minimised beside the loss, one value for each of the predictions [N] of step k; None: nothing. accepted [N]:
        their expected acceptance, without gradient."""
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
            yield slots, self.logits(states[slots], k)

    def forward(self, batch: Batch) -> Sums:
        loss = torch.zeros((), device=batch.token_ids.device)
        accepted, count = [], []
        reach = torch.ones(
            batch.token_ids.shape, device=batch.token_ids.device
        )  # expected share of chains that get to each slot
        for k, all_states in enumerate(self.states(batch)):
            slots = self.trained_slots(batch, k)
            weights, states = self.position_weights(batch, slots, k), all_states[slots]
            if self.survival and k:
                weights = reach[slots] if weights is None else weights * reach[slots]
            value, reached = self.head_loss(states, k, self.cached_teacher(batch, slots, k), weights)
            if (more := self.beside(batch, slots, k, states, reached)) is not None:
                value = value + (more if weights is None else weights * more).sum()
            loss = loss + self.decay**k * value
            reach[slots] *= reached.to(reach.dtype)
            accepted.append(reached.sum())
            count.append(slots.sum().float())
        return Sums(loss, torch.stack(accepted), torch.stack(count))

    def head_loss(
        self, states: Tensor, k: int, teacher: AnyTeacher, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Σ of weights [N] · loss over states [N, H] of step k, and their expected acceptance [N] without gradient."""
        if (head := self.head(k)) is not None:
            before, weight = head
            return head_loss(before(states), weight, teacher, self.loss, self.loss.temperature, weights)
        logits = functools.partial(self.logits, k=k)
        return recomputed_loss(states, logits, self.vocabulary.size, teacher, self.loss, self.loss.temperature, weights)

    def cached_teacher(self, batch: Batch, slots: Tensor, k: int) -> AnyTeacher:
        """What the target says where the slots of step k predict: listed, drawn, or recomputed from its last states."""
        places = self.teacher_places(slots, k)
        tokens = None
        if self.loss.needs_tokens:
            tokens = self.vocabulary.to_draft(batch.token_ids[places[0], places[1] + 1])
        if batch.teacher is None:
            if batch.last is None or self.target_head is None:
                raise UserError(
                    "the batch holds neither a distribution nor last states to compute one from; cache it again"
                )
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

    def logits(self, states: Tensor, k: int) -> Tensor:
        return self._draft.head(states)

    def head(self, k: int) -> tuple[Callable[[Tensor], Tensor], Tensor] | None:
        weight = self._draft.plain_head
        return None if weight is None else (lambda states: states, weight)


class EagleObjective(Objective):
    """An EAGLE head under training-time test: slot t at rollout step k predicts x_{t+2+k}.

    columns: which of a batch's taps the head fuses (None: all). detach: no gradient from a step into the one before it (HASS).
    feature_loss: weight of EAGLE-1's regression, smooth L1 between the head's state and the target's last state h_{t+1+k} that it
    stands for (mean over the width). noise: U(−noise, noise) added to the features while training (EAGLE-1's augmentation).
    confidence: weight of the binary cross-entropy between the head's confidence and the expected acceptance.
    """

    lead = 2

    def __init__(
        self,
        head: EagleHead,
        steps: int,
        decay: float = 1.0,
        loss: Loss = FORWARD_KL,
        target_head: Callable[[Tensor], Tensor] | None = None,
        *,
        columns: Sequence[int] | None = None,
        detach: bool = False,
        survival: bool = False,
        feature_loss: float = 0.0,
        noise: float = 0.0,
        confidence: float = 0.0,
    ) -> None:
        super().__init__(loss, target_head)
        if steps < 1:
            raise UserError(f"eagle.rollouts {steps}: must be at least 1 (1 is training without rollouts)")
        self.eagle = head
        self.vocabulary = head.vocabulary
        self.steps, self.decay, self.survival = steps, decay, survival
        self.columns = None if columns is None else list(columns)
        self.detach, self.feature_loss, self.noise, self.confidence = detach, feature_loss, noise, confidence

    def states(self, batch: Batch) -> Iterator[Tensor]:
        features = self.features(batch)
        if self.training and self.noise:
            features = features + self.noise * (2 * torch.rand_like(features) - 1)
        return rollout(self.eagle, batch.token_ids, features, self.steps, self.detach)

    def features(self, batch: Batch) -> Tensor:
        """The target's taps [B, T, A, W] that the head fuses, or its last states [B, T, W] for EAGLE-1."""
        if not self.eagle.config.taps:
            return last_of(batch)
        if batch.taps is None:
            raise UserError("the cache holds no taps: cache it again with cache.taps set")
        return batch.taps if self.columns is None else batch.taps[:, :, self.columns]

    def logits(self, states: Tensor, k: int) -> Tensor:
        return self.eagle.logits(states)

    def head(self, k: int) -> tuple[Callable[[Tensor], Tensor], Tensor] | None:
        own = self.eagle.lm_head
        return None if own is None else (self.eagle.normed, own.weight)

    def beside(self, batch: Batch, slots: Tensor, k: int, states: Tensor, accepted: Tensor) -> Tensor | None:
        value = None
        if self.feature_loss:
            wanted = last_of(batch)[self.teacher_places(slots, k)].to(states.dtype)
            value = self.feature_loss * F.smooth_l1_loss(states, wanted, reduction="none").mean(-1)
        if self.confidence:
            logits = self.eagle.confidence(states)
            unsure = self.confidence * F.binary_cross_entropy_with_logits(
                logits, accepted.clamp(0, 1).to(logits.dtype), reduction="none"
            )
            value = unsure if value is None else value + unsure
        return value


class MedusaObjective(Objective):
    """Medusa heads: head k at slot t reads h_t alone and predicts x_{t+2+k}; its teacher is the target's distribution there, of
    which no single head can see the tokens in between."""

    lead = 2

    def __init__(
        self,
        heads: MedusaHeads,
        decay: float = 1.0,
        loss: Loss = FORWARD_KL,
        target_head: Callable[[Tensor], Tensor] | None = None,
        *,
        survival: bool = False,
    ) -> None:
        super().__init__(loss, target_head)
        self.medusa = heads
        self.vocabulary = heads.vocabulary
        self.steps, self.decay, self.survival = heads.config.heads, decay, survival

    def states(self, batch: Batch) -> Iterator[Tensor]:
        return (self.medusa.state(last_of(batch), k) for k in range(self.steps))

    def logits(self, states: Tensor, k: int) -> Tensor:
        return self.medusa.logits(states, k)

    def head(self, k: int) -> tuple[Callable[[Tensor], Tensor], Tensor] | None:
        return (lambda states: states), self.medusa.lm_heads[k].get_parameter("weight")


def last_of(batch: Batch) -> Tensor:
    """The target's last states [B, T, W] of a batch. Raises UserError for a cache without them."""
    if batch.last is None:
        raise UserError("the cache holds no last states: cache it again with cache.last=true")
    return batch.last
