"""What the target says at N positions, in the forms that losses take: of listed tokens, of drawn ones, or of all.

Knows probabilities and draft ids. Does not know what is made of them (`draftsmith.train.losses`) nor where they were kept.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.models.vocabulary import DraftVocabulary

if TYPE_CHECKING:
    from draftsmith.models.target import Target

TINY = 1e-30  # stands for 0 under a logarithm


@dataclass(frozen=True)
class Teacher:
    """The target's distribution at N positions, of k columns each.

    ids [N, k]: distinct draft ids of the columns, −1 for tokens the draft cannot say and for unused columns; None: column v is
    draft id v, and columns from V_d on are tokens the draft cannot say. p [N, k]: true probabilities, 0 in unused columns.
    weight [N, k]: None if every column counts as it is, and 1 − Σ p is the mass of all tokens not listed; else the columns were
    drawn from the target and weight is an unbiased estimate of p: Σ_v (weight / p)_v f_v estimates the sum of f over all tokens.
    tokens [N]: draft ids of the text's own next tokens (−1: cannot say), for losses that ask for them.
    """

    ids: Tensor | None
    p: Tensor
    weight: Tensor | None = None
    tokens: Tensor | None = None

    def __len__(self) -> int:
        return self.p.shape[0]

    def __getitem__(self, rows: slice) -> "Teacher":
        fields = (self.ids, self.p, self.weight, self.tokens)
        ids, p, weight, tokens = (None if field is None else field[rows] for field in fields)
        assert p is not None
        return Teacher(ids, p, weight, tokens)

    @property
    def columns(self) -> int:
        """Numbers that a row takes while a loss is computed."""
        return self.p.shape[1]

    def tempered(self, temperature: float) -> "Teacher":
        """The same target at softmax temperature T, p^(1/T) / Σ p^(1/T). The columns must be the target's whole vocabulary:
        Σ p^(1/T) of unlisted tokens cannot be known from their mass, nor a ratio be estimated without bias from draws."""
        if self.weight is not None:
            raise UserError("temperature: needs the target's whole distribution, and this teacher was sampled from it")
        p = (self.p.clamp(min=TINY).log() / temperature).softmax(-1)
        return Teacher(self.ids, p, None, self.tokens)


def dense_teacher(p: Tensor) -> Teacher:
    """A teacher that knows every token: p [N, V] over the draft's own vocabulary."""
    return Teacher(None, p)


@dataclass(frozen=True)
class LastTeacher:
    """The target's full distribution, recomputed from its last states [N, W] through its frozen head, for as many rows at a time
    as are asked for; never all at once. head: [n, W] → logits [n, V]. tokens: as in `Teacher`."""

    states: Tensor
    head: Callable[[Tensor], Tensor]
    vocabulary: DraftVocabulary
    tokens: Tensor | None = None

    def __len__(self) -> int:
        return self.states.shape[0]

    @torch.no_grad()
    def __getitem__(self, rows: slice) -> Teacher:
        p = self.head(self.states[rows]).float().softmax(-1)
        if not self.vocabulary.full:
            p = p[:, self.vocabulary.draft_first.to(p.device)]
        return Teacher(None, p, None, None if self.tokens is None else self.tokens[rows])

    @property
    def columns(self) -> int:
        """Numbers that a row takes while a loss is computed."""
        return self.vocabulary.target_size


AnyTeacher = Teacher | LastTeacher


def frozen_head(target: "Target") -> Callable[[Tensor], Tensor]:
    """Last states [n, W] of any precision → the target's logits [n, V]: what a `LastTeacher` is given."""
    return lambda last: target.head(last.to(target.dtype))
