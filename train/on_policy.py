"""Rows that the draft continues itself, scored by the target at work, mixed with rows as they were cached.

A draft that has only seen text that others wrote meets its own tokens for the first time while decoding. Here a share of every
batch keeps its prompt and gets an answer of the same length from the draft (on-policy distillation: arXiv 2306.13649,
2310.08461). Knows sources of rows and LMs; knows no loss.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.data.batches import NO_MASS, Batch, Sampled, TopK
from draftsmith.models.draft import DraftLM
from draftsmith.models.target import Target
from draftsmith.train.checkpoint import kept, trained
from draftsmith.train.feeder import Source
from draftsmith.train.ranks import whole
from draftsmith.train.settings import OnPolicySettings


class OnPolicy:
    """A `Source`: the rows of another one, some of them continued by the draft.

    Lengths are unchanged. The continuing draft is a copy, the writer, that takes the draft's weights every `settings.every` steps.
    What a row becomes depends on the seed, the step, its number and the writer alone, so that it is the same in any batch, on any
    rank and after an interruption.
    """

    def __init__(self, source: Source, draft: DraftLM, target: Target, settings: OnPolicySettings, seed: int) -> None:
        self.source, self.lengths = source, source.lengths
        self._draft, self._target, self._settings = draft, target, settings
        self._seed, self._step = seed, 0
        self._writer = DraftLM(copy.deepcopy(draft.model).float().eval()).of(target)

    @property
    def identity(self) -> str:
        """Of the wrapped source; what else decides are settings and the seed."""
        return str(getattr(self.source, "identity", ""))

    @torch.no_grad()
    def begin(self, step: int) -> None:
        """Rows are asked for by this step from now on; the writer gets the draft's weights where it is due."""
        self._step = step
        if step % self._settings.every == 0:
            drafted = trained(self._draft.model)
            for name, parameter in trained(self._writer.model).items():
                parameter.copy_(whole(drafted[name]))

    def state(self) -> dict[str, Tensor]:
        """The writer's weights, but for frozen ones."""
        return {name: kept(parameter) for name, parameter in trained(self._writer.model).items()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Give the writer these weights."""
        for name, parameter in trained(self._writer.model).items():
            parameter.copy_(state[name])

    def batch(self, indices: Sequence[int]) -> Batch:
        """Rows `indices` of the wrapped source; of the chosen ones the last answer is the draft's, with the target's teacher."""
        batch = self.source.batch(indices)
        rngs = [np.random.default_rng([self._seed, self._step, int(row)]) for row in indices]
        chosen = [place for place, rng in enumerate(rngs) if rng.random() < self._settings.share]
        return self._continued(batch, torch.tensor(chosen), [rngs[place] for place in chosen]) if chosen else batch

    @torch.no_grad()
    def _continued(self, batch: Batch, rows: Tensor, rngs: Sequence[np.random.Generator]) -> Batch:
        lengths = batch.lengths[rows]
        starts, ends = answers(batch.supervised[rows], lengths)
        uniforms = torch.zeros(batch.token_ids.shape[1], len(rows), dtype=torch.float64)
        for place, rng in enumerate(rngs):
            count = int(ends[place] - starts[place])
            uniforms[:count, place] = torch.from_numpy(rng.random(count))
        written = self._write(batch.token_ids[rows], starts, ends, uniforms)
        ids, supervised = batch.token_ids.clone(), batch.supervised.clone()
        ids[rows] = written
        supervised[rows] &= ~after_eos(written, starts, ends, self._target.eos_ids)
        # Taps are not for draft LMs; those of the rows as they were would be wrong.
        fresh = replace(batch, token_ids=ids, supervised=supervised, taps=None)
        last = self._target.forward(written.to(self._target.device), want_logits=False).last
        if batch.last is not None:
            fresh = replace(fresh, last=batch.last.index_copy(0, rows, last.to(batch.last)))
        return fresh if batch.teacher is None else replace(fresh, teacher=self._taught(batch.teacher, rows, last, rngs))

    def _write(self, ids: Tensor, starts: Tensor, ends: Tensor, uniforms: Tensor) -> Tensor:
        """ids [n, T] with the slots from starts[i] to ends[i] drawn from the writer, token by token, all rows at once.

        uniforms [T, n] in [0, 1): the j-th token of an answer is the first with Σ q up to it at or above number j.
        """
        writer, ids, rows = self._writer, ids.clone(), torch.arange(len(ids))
        longest = int((ends - starts).max())
        cache = writer.new_cache(len(ids), int(starts.max()) + longest)
        states = writer.forward(ids[:, : int(starts.max())].to(writer.device), cache=cache, want_logits=False).last
        state = states[rows, starts - 1]
        cache.set_lengths(starts.to(writer.device))
        for step in range(longest):
            q = (writer.head(state)[:, : writer.usable].double() / self._settings.temperature).softmax(-1).cpu()
            drawn = torch.searchsorted(q.cumsum(-1), uniforms[step, :, None]).squeeze(-1).clamp(max=writer.usable - 1)
            open_rows = starts + step < ends  # shorter answers are complete; what is drawn for them is dropped
            ids[rows[open_rows], (starts + step)[open_rows]] = drawn[open_rows]
            if step + 1 < longest:
                output = writer.forward(drawn[:, None].to(writer.device), cache=cache, want_logits=False)
                cache.set_lengths(cache.lengths + 1)
                state = output.last[:, 0]
        return ids

    def _taught(
        self, teacher: TopK | Sampled, rows: Tensor, last: Tensor, rngs: Sequence[np.random.Generator]
    ) -> TopK | Sampled:
        """The teacher with the target's distributions of these rows, in the form that the others have."""
        fresh = [listed(self._target.head(states), teacher, rng) for states, rng in zip(last, rngs, strict=True)]
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
