"""Rows that the draft continues itself, scored by the target at work, mixed with rows as they were cached.

A draft that has only seen text that others wrote meets its own tokens for the first time while decoding. Here a share of every
batch keeps its prompt and gets an answer of the same length from the draft (on-policy distillation: arXiv 2306.13649,
2310.08461). Knows sources of rows and LMs; knows no loss.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.data.batches import NO_MASS, Batch, Sampled, TopK
from draftsmith.models.draft import DraftLM
from draftsmith.models.target import Target
from draftsmith.train.loop import Source
from draftsmith.train.settings import OnPolicySettings


class OnPolicy:
    """A `Source`: the rows of another one, some of them continued by the draft.

    Lengths are unchanged. The continuing draft is a copy that takes the draft's weights every `settings.every` batches. A batch
    depends on the seed, on how many were asked for before, and on the weights at the last of these moments.
    """

    def __init__(self, source: Source, draft: DraftLM, target: Target, settings: OnPolicySettings, seed: int) -> None:
        self.lengths = source.lengths
        self.identity = getattr(source, "identity", "")  # other rows below are other rows here
        self._source, self._draft, self._target, self._settings = source, draft, target, settings
        self._seed, self._batches = seed, 0
        self._writer = draft

    def batch(self, indices: Sequence[int]) -> Batch:
        """Rows `indices` of the wrapped source; of the chosen ones the last answer is the draft's, with the target's teacher."""
        batch = self._source.batch(indices)
        rng = np.random.default_rng([self._seed, self._batches])
        chosen = torch.from_numpy(np.flatnonzero(rng.random(len(indices)) < self._settings.share))
        if self._batches % self._settings.every == 0 and self._settings.share > 0:
            self._writer = DraftLM(copy.deepcopy(self._draft.model).eval()).of(self._target)
        self._batches += 1
        return self._continued(batch, chosen, rng) if len(chosen) else batch

    @torch.no_grad()
    def _continued(self, batch: Batch, rows: Tensor, rng: np.random.Generator) -> Batch:
        lengths = batch.lengths[rows]
        starts, ends = answers(batch.supervised[rows], lengths)
        written = self._write(batch.token_ids[rows], starts, ends, rng)
        ids, supervised = batch.token_ids.clone(), batch.supervised.clone()
        ids[rows] = written
        supervised[rows] &= ~after_eos(written, starts, ends, self._target.eos_ids)
        # Taps are not for draft LMs; those of the rows as they were would be wrong.
        fresh = replace(batch, token_ids=ids, supervised=supervised, taps=None)
        last = self._target.forward(written.to(self._target.device), want_logits=False).last
        if batch.last is not None:
            fresh = replace(fresh, last=batch.last.index_copy(0, rows, last.to(batch.last)))
        return fresh if batch.teacher is None else replace(fresh, teacher=self._taught(batch.teacher, rows, last, rng))

    def _write(self, ids: Tensor, starts: Tensor, ends: Tensor, rng: np.random.Generator) -> Tensor:
        """ids [n, T] with the slots from starts[i] to ends[i] drawn from the draft, token by token, all rows at once."""
        writer, ids, rows = self._writer, ids.clone(), torch.arange(len(ids))
        longest = int((ends - starts).max())
        cache = writer.new_cache(len(ids), int(starts.max()) + longest)
        states = writer.forward(ids[:, : int(starts.max())].to(writer.device), cache=cache, want_logits=False).last
        state = states[rows, starts - 1]
        cache.set_lengths(starts.to(writer.device))
        for step in range(longest):
            q = (writer.head(state)[:, : writer.usable].double() / self._settings.temperature).softmax(-1).cpu()
            uniform = torch.from_numpy(rng.random((len(ids), 1)))
            drawn = torch.searchsorted(q.cumsum(-1), uniform).squeeze(-1).clamp(max=writer.usable - 1)
            open_rows = starts + step < ends  # shorter answers are complete; what is drawn for them is dropped
            ids[rows[open_rows], (starts + step)[open_rows]] = drawn[open_rows]
            if step + 1 < longest:
                output = writer.forward(drawn[:, None].to(writer.device), cache=cache, want_logits=False)
                cache.set_lengths(cache.lengths + 1)
                state = output.last[:, 0]
        return ids

    def _taught(self, teacher: TopK | Sampled, rows: Tensor, last: Tensor, rng: np.random.Generator) -> TopK | Sampled:
        """The teacher with the target's distributions of these rows, in the form that the others have."""
        fresh = [listed(self._target.head(states), teacher, rng) for states in last]
        parts = [
            part.index_copy(0, rows, torch.stack([new[i] for new in fresh]).to(part)) for i, part in enumerate(teacher)
        ]
        made: Any = type(teacher)(*parts)
        return made


def listed(logits: Tensor, like: TopK | Sampled, rng: np.random.Generator) -> TopK | Sampled:
    """The target's distribution at logits [T, V], as `like` keeps its own: as many likeliest tokens, or as many draws."""
    log_p = logits.float().log_softmax(-1)
    n = like.ids.shape[-1]
    if isinstance(like, TopK):
        log_probs, ids = log_p.topk(n, dim=-1)
        return TopK(ids, log_probs)
    generator = torch.Generator(log_p.device).manual_seed(int(rng.integers(2**63)))
    drawn = torch.multinomial(log_p.exp(), n, replacement=True, generator=generator).sort(-1).values
    # A token drawn several times stands once, with its share of the draws.
    first = torch.ones_like(drawn, dtype=torch.bool)
    first[:, 1:] = drawn[:, 1:] != drawn[:, :-1]
    shares = (drawn[:, :, None] == drawn[:, None, :]).float().mean(-1)
    log_probs = log_p.gather(-1, drawn)
    return Sampled(drawn.where(first, -1), log_probs.where(first, NO_MASS), shares.where(first, 0.0))


def answers(supervised: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """First slot and end [n] of what is replaced in each row: the last supervised run, or a plain text's second half.

    supervised [n, T]; lengths [n]. A text is supervised from slot 1 on and has no prompt of its own.
    """
    slots = torch.arange(supervised.shape[1])
    ends = torch.where(supervised, slots + 1, 0).amax(1)
    # The run before `ends` begins behind the last unsupervised slot.
    starts = torch.where(~supervised & (slots < ends[:, None]), slots + 1, 0).amax(1)
    starts = torch.where(starts <= 1, lengths // 2, starts).clamp(min=1)
    return starts, torch.maximum(ends, starts)


def after_eos(ids: Tensor, starts: Tensor, ends: Tensor, eos_ids: frozenset[int]) -> Tensor:
    """bool [n, T]: slots of an answer behind its first end of text, where nothing is decoded any more."""
    slots = torch.arange(ids.shape[1])
    inside = (slots >= starts[:, None]) & (slots < ends[:, None])
    stops = torch.isin(ids, torch.tensor(sorted(eos_ids), dtype=ids.dtype)) & inside
    return inside & (stops.long().cumsum(1) - stops.long() > 0)
