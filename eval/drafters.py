"""Drafters: each proposes, for every active row, a token tree below the pending token.

They see the committed tokens and the target's states of them, never the future. Each keeps its own cache and cleans up after
itself: entries of drafted tokens are dropped before the next proposal. Knows nothing of acceptance.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.eval.sampling import Sampler
from draftsmith.eval.tree import Proposal, chain
from draftsmith.models.eagle import Attend, EagleHead
from draftsmith.models.kv import KVCache, attention_mask
from draftsmith.models.lm import LanguageModel


@dataclass(frozen=True)
class Committed:
    """What is known of the active rows.

    tokens: all committed tokens of each row; the last one is pending (the target has not read it). last [B, m, W] and taps
    [B, m, A, W]: the target's states of the `counts[b]` tokens of each row that it has read since the previous proposal.
    """

    tokens: list[list[int]]
    last: Tensor
    taps: Tensor | None
    counts: Tensor

    def select(self, rows: Tensor) -> "Committed":
        """The same of these rows only."""
        counts = self.counts[rows]
        width = int(counts.max())
        taps = None if self.taps is None else self.taps[rows, :width]
        return Committed([self.tokens[row] for row in rows.tolist()], self.last[rows, :width], taps, counts)


class Drafter(Protocol):
    """The contract of everything that drafts. `taps`: the target's block outputs that `propose` wants to see."""

    taps: tuple[int, ...]

    def begin(self, batch: int, capacity: int) -> None:
        """Forget everything; expect `batch` rows of at most `capacity` tokens, drafted ones included."""

    def propose(self, committed: Committed, K: int, sampler: Sampler) -> Proposal:
        """A tree of depth at most K for every row."""

    def keep(self, rows: Tensor) -> None:
        """Only these of the active rows go on."""


class NoDraft:
    """Proposes nothing: speculative decoding with it is plain decoding."""

    taps: tuple[int, ...] = ()

    def begin(self, batch: int, capacity: int) -> None:
        pass

    def propose(self, committed: Committed, K: int, sampler: Sampler) -> Proposal:
        return chain(torch.tensor([[tokens[-1]] for tokens in committed.tokens]))

    def keep(self, rows: Tensor) -> None:
        pass


class LMDrafter:
    """A causal LM drafts a chain. With the target itself it is the oracle, whose every token is accepted."""

    taps: tuple[int, ...] = ()

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    def begin(self, batch: int, capacity: int) -> None:
        self.cache = self.model.new_cache(batch, capacity)

    def propose(self, committed: Committed, K: int, sampler: Sampler) -> Proposal:
        # Entries of drafted tokens that were accepted hold; of rejected ones, nothing may stay.
        self.cache.set_lengths(
            torch.tensor([_agreeing(a, b) for a, b in zip(self._seen(), committed.tokens, strict=True)])
        )
        new = [tokens[length:] for tokens, length in zip(committed.tokens, self.cache.lengths.tolist(), strict=True)]
        ids, counts = _pad(new)
        drafted: list[list[int]] = []
        distributions: list[Tensor | None] = []
        for _ in range(K):
            out = self.model.forward(ids, cache=self.cache, want_logits=False)
            self.cache.set_lengths(self.cache.lengths + counts)
            logits = self.model.head(_at_last(out.last, counts))
            tokens, q = sampler.draft(logits)
            drafted.append(tokens)
            distributions.append(q)
            ids, counts = torch.tensor(tokens)[:, None], torch.ones_like(counts)
        self._drafted = [[*tokens, *(step[row] for step in drafted)] for row, tokens in enumerate(committed.tokens)]
        return _as_chain(committed, drafted, distributions)

    def keep(self, rows: Tensor) -> None:
        self.cache.select(rows)
        self._drafted = [self._drafted[row] for row in rows.tolist()]

    def _seen(self) -> list[list[int]]:
        """The tokens whose entries the cache holds."""
        lengths = self.cache.lengths.tolist()
        if self.cache.longest == 0:
            return [[] for _ in lengths]
        return [tokens[:length] for tokens, length in zip(self._drafted, lengths, strict=True)]


class EagleDrafter:
    """An EAGLE head drafts a chain: true features for what the target has read, its own states after that."""

    def __init__(self, head: EagleHead) -> None:
        self.head = head
        self.taps = head.config.taps

    def begin(self, batch: int, capacity: int) -> None:
        self.cache = KVCache(batch, capacity, self.head.config.layers, self.head.fc.weight.device)

    def propose(self, committed: Committed, K: int, sampler: Sampler) -> Proposal:
        assert committed.taps is not None
        counts = committed.counts
        if committed.taps.shape[1] == 0:  # prompts of one token: the target has read nothing, there is no feature yet
            return _as_chain(committed, [], [])
        # Slot t joins the target's g_t with the token after it, so the newest slot reads the pending token.
        joined, _ = _pad([t[len(t) - count :] for t, count in zip(committed.tokens, counts.tolist(), strict=True)])
        state = self._step(joined, self.head.fuse(committed.taps), counts)
        stable = self.cache.lengths
        state = _at_last(state, counts)[:, None]
        drafted: list[list[int]] = []
        distributions: list[Tensor | None] = []
        for k in range(K):
            if k > 0:
                state = self._step(torch.tensor(drafted[-1])[:, None], state, torch.ones_like(counts))
            tokens, q = sampler.draft(self.head.logits(state[:, 0]))
            drafted.append(self.head.vocabulary.to_target(torch.tensor(tokens)).tolist())
            distributions.append(None if q is None else self.head.vocabulary.widen(q))
        self.cache.set_lengths(stable)
        proposal = _as_chain(committed, drafted, distributions)
        # A row without any feature yet, beside others that have some, drafts nothing.
        return Proposal(proposal.tokens, proposal.parents, torch.where(stable > 0, proposal.sizes, 1), proposal.q)

    def keep(self, rows: Tensor) -> None:
        self.cache.select(rows)

    def _step(self, tokens: Tensor, state: Tensor, counts: Tensor) -> Tensor:
        """Run the head over the next slots of each row and keep their entries. Buffer index = slot = RoPE position."""
        positions = self.cache.slots(tokens.shape[1])
        visible = torch.ones(1, tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        state = self.head.step(tokens, state, positions, cached_attention(self.cache, visible, positions))
        self.cache.set_lengths(self.cache.lengths + counts)
        return state


class PromptLookup:
    """Proposes what followed the most recent earlier occurrence of the text's last n tokens (n = 3, then 2, then 1)."""

    taps: tuple[int, ...] = ()

    def __init__(self, longest: int = 3) -> None:
        self.longest = longest

    def begin(self, batch: int, capacity: int) -> None:
        pass

    def propose(self, committed: Committed, K: int, sampler: Sampler) -> Proposal:
        found = [self._continuation(tokens, K) for tokens in committed.tokens]
        ids, sizes = _pad([[tokens[-1], *more] for tokens, more in zip(committed.tokens, found, strict=True)])
        return chain(ids, sizes)

    def keep(self, rows: Tensor) -> None:
        pass

    def _continuation(self, tokens: list[int], K: int) -> list[int]:
        for n in range(min(self.longest, len(tokens) - 1), 0, -1):
            suffix = tokens[-n:]
            for start in range(len(tokens) - n - 1, -1, -1):
                if tokens[start : start + n] == suffix:
                    return tokens[start + n : start + n + K]
        return []


def cached_attention(cache: KVCache, visible: Tensor, positions: Tensor) -> Attend:
    """An `Attend` whose keys and values live in a `KVCache` (decoding)."""

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = cache.layers[layer].update(key, value)
        mask = attention_mask(cache, visible, positions, query.dtype)
        return F.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)

    return attend


def _pad(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Right-padded ids [B, n] and their counts [B]."""
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows]), torch.tensor([len(row) for row in rows])


def _at_last(values: Tensor, counts: Tensor) -> Tensor:
    """values [B, n, …] at each row's last real entry: [B, …]."""
    return values[torch.arange(len(counts)), (counts - 1).clamp(min=0)]


def _agreeing(seen: list[int], tokens: list[int]) -> int:
    """How many leading tokens two lists share, at most all but the last of `tokens`: the pending one is always fed anew."""
    limit = min(len(seen), len(tokens) - 1)
    return next((i for i in range(limit) if seen[i] != tokens[i]), limit)


def _as_chain(committed: Committed, drafted: list[list[int]], distributions: list[Tensor | None]) -> Proposal:
    roots = [tokens[-1] for tokens in committed.tokens]
    qs = [q for q in distributions if q is not None]
    return chain(torch.tensor([roots, *drafted]).T, q=torch.stack(qs, dim=1) if qs else None)
