"""The draft's vocabulary: a sorted subset of the target's ids (or all of them), stored as engines store it.

`d2t[i]` is an offset: target id = i + d2t[i]; `t2d` is a boolean mask over target ids. Knows nothing of text.
"""

import functools

import torch
from torch import Tensor

from draftsmith.errors import UserError


class DraftVocabulary:
    """V_d draft ids out of V target ids, ascending. `full` drafts speak every target id, and the maps are the identity."""

    def __init__(self, target_ids: Tensor, target_size: int) -> None:
        """target_ids: [V_d] int64, strictly ascending, below `target_size`. Raises UserError otherwise."""
        if (
            len(target_ids) == 0
            or bool((target_ids.diff() <= 0).any())
            or not 0 <= int(target_ids[0]) <= int(target_ids[-1]) < target_size
        ):
            raise UserError(f"draft vocabulary: ids must rise strictly within 0 … {target_size - 1}")
        self.target_ids = target_ids
        self.target_size = target_size
        self.size = len(target_ids)
        self.full = self.size == target_size
        self.d2t = target_ids - torch.arange(self.size)
        self.t2d = torch.zeros(target_size, dtype=torch.bool)
        self.t2d[target_ids] = True
        self._draft_ids = torch.full((target_size,), -1)
        self._draft_ids[target_ids] = torch.arange(self.size)

    @classmethod
    def all_of(cls, target_size: int) -> "DraftVocabulary":
        return cls(torch.arange(target_size), target_size)

    @classmethod
    def most_frequent(cls, counts: Tensor, size: int, always: set[int]) -> "DraftVocabulary":
        """The `size` ids with the largest `counts` [V] (ties and unseen fillers by ascending id), `always` among them."""
        if not len(always) <= size <= len(counts):
            raise UserError(
                f"draft vocabulary of {size} ids: must be between {len(always)} special ids and {len(counts)}"
            )
        order = counts.double().clone()
        order[sorted(always)] = float("inf")
        chosen = torch.sort(order, descending=True, stable=True).indices[:size]
        return cls(chosen.sort().values, len(counts))

    @functools.cached_property
    def draft_first(self) -> Tensor:
        """[V] all target ids: the draft's in their order, then those that it cannot say."""
        return torch.cat([self.target_ids, (~self.t2d).nonzero().squeeze(1)])

    def coverage(self, counts: Tensor) -> float:
        """Share of the tokens counted in `counts` [V] that the draft can say; 1 where nothing was counted."""
        total = float(counts.sum())
        return float(counts[self.t2d].sum()) / total if total else 1.0

    def to_draft(self, target_ids: Tensor) -> Tensor:
        """Draft ids of target ids, −1 where the draft does not have the token. Any shape."""
        return target_ids if self.full else self._draft_ids.to(target_ids.device)[target_ids]

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Target ids of draft ids. Any shape."""
        return draft_ids if self.full else self.target_ids.to(draft_ids.device)[draft_ids]

    def widen(self, q: Tensor) -> Tensor:
        """Draft probabilities [..., V_d] → the same over the target's vocabulary [..., V], zero elsewhere."""
        if self.full:
            return q
        wide = q.new_zeros(*q.shape[:-1], self.target_size)
        wide[..., self.target_ids.to(q.device)] = q
        return wide
