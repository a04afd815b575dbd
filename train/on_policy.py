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

from draftsmith.data.batches import Batch, Sampled, TopK
from draftsmith.data.cache.codecs import DISTRIBUTION_CODECS
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
        return fresh if batch.teacher is None else replace(fresh, teacher=self._taught(batch.teacher, rows, last))

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

    def _taught(self, teacher: TopK | Sampled, rows: Tensor, last: Tensor) -> TopK | Sampled:
        """The teacher with the target's distributions of these rows, in the form that the others have."""
        codec = DISTRIBUTION_CODECS["topk" if isinstance(teacher, TopK) else "sampled"]
        parts: list[Tensor] = [part.clone() for part in teacher]
        for row, states in zip(rows.tolist(), last, strict=True):
            logits = self._target.head(states)
            for part, fresh in zip(parts, codec.decode(codec.encode(logits, teacher.ids.shape[-1])), strict=True):
                part[row] = fresh.to(part)
        made: Any = type(teacher)(*parts)
        return made


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
