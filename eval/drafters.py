"""Drafters: each proposes, for every active row, a token tree below the pending token.

They see the committed tokens and the target's states of them, never the future. Each keeps its own cache and cleans up after
itself: entries of drafted tokens are dropped before the next proposal. Knows nothing of acceptance.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.eval.growth import grow
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.tree import Proposal, Shape, chain
from draftsmith.models.eagle import Attend, EagleHead
from draftsmith.models.kv import KVCache, attention_mask
from draftsmith.models.lm import LanguageModel, LMOutput
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.vocabulary import DraftVocabulary


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

    @classmethod
    def along(cls, paths: list[list[int]], tokens: list[list[int]], out: LMOutput) -> "Committed":
        """After a verify: `out` is the target's of the whole tree, and each row keeps the nodes on its path."""
        counts = [len(path) for path in paths]
        width = max(counts)
        if all(path[-1] == len(path) - 1 for path in paths):  # the first nodes of each
            taps = None if out.taps is None else out.taps[:, :width]
            return cls(tokens, out.last[:, :width], taps, torch.tensor(counts))
        nodes = torch.tensor([path + [path[-1]] * (width - len(path)) for path in paths])
        rows = torch.arange(len(paths))[:, None]
        taps = None if out.taps is None else out.taps[rows, nodes]
        return cls(tokens, out.last[rows, nodes], taps, torch.tensor(counts))

    def select(self, rows: Tensor) -> "Committed":
        """The same of these rows only."""
        counts = self.counts[rows]
        width = int(counts.max())
        taps = None if self.taps is None else self.taps[rows, :width]
        return Committed([self.tokens[row] for row in rows.tolist()], self.last[rows, :width], taps, counts)


class Drafter:
    """The contract of everything that drafts. `taps`: the target's block outputs that `propose` wants to see; own_tree: what
    results call its proposals if they do not take the shape that is asked for."""

    taps: tuple[int, ...] = ()
    own_tree: str = ""
    most_nodes: int = 0  # of a proposal that does not keep to the shape asked for

    def begin(self, batch: int, capacity: int) -> None:
        """Forget everything; expect `batch` rows of at most `capacity` tokens, drafted ones included."""

    def propose(self, committed: Committed, shape: Shape, sampler: Sampler) -> Proposal:
        """A tree of this shape, or a part of it, for every row."""
        raise NotImplementedError

    def confidence(self) -> Tensor:
        """[B]: the expected acceptance of the next token below the newest node, for shapes that stop drafting by it."""
        raise UserError(f"{type(self).__name__} has no confidence to stop drafting by; train an EAGLE head with it")

    def observe(self, logits: Tensor) -> None:
        """The target's logits [B, n, V] after every node of the last proposal, before any row is dropped."""

    def keep(self, rows: Tensor) -> None:
        """Only these of the active rows go on."""


class NoDraft(Drafter):
    """Proposes nothing: speculative decoding with it is plain decoding."""

    own_tree = "none"

    def propose(self, committed: Committed, shape: Shape, sampler: Sampler) -> Proposal:
        return chain(_pending(committed)[:, None])


class LMDrafter(Drafter):
    """A causal LM drafts. With the target itself it is the oracle, whose every token is accepted."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.vocabulary = DraftVocabulary.all_of(model.vocabulary)

    def begin(self, batch: int, capacity: int) -> None:
        self.cache = self.model.new_cache(batch, capacity)
        self._run = torch.zeros(batch, 0, dtype=torch.long)
        self._run_parents = torch.zeros(batch, 0, dtype=torch.long)

    def propose(self, committed: Committed, shape: Shape, sampler: Sampler) -> Proposal:
        self._keep_accepted(committed.tokens)
        ids, counts = _pad([t[n:] for t, n in zip(committed.tokens, self.cache.lengths.tolist(), strict=True)])
        states = self.model.forward(ids, cache=self.cache, want_logits=False).last
        self.cache.set_lengths(self.cache.lengths + counts)
        self._run = self._run_parents = ids[:, :0]
        logits = self.model.only_tokens(self.model.head(_at_last(states, counts)))
        self._newest = logits
        return grow(self, _pending(committed), logits, shape, sampler)

    def extend(self, tokens: Tensor, parents: Tensor, visible: Tensor, depth: int) -> Tensor:
        depths = torch.full((1, tokens.shape[1]), depth - 1)
        out = self.model.forward(tokens, cache=self.cache, visible=visible, depths=depths)
        self.cache.hold(self.cache.lengths[:, None] + depths)
        self._run, self._run_parents = torch.cat([self._run, tokens], 1), torch.cat([self._run_parents, parents], 1)
        logits = self.model.only_tokens(out.logits)
        self._newest = logits[:, -1]
        return logits

    def confidence(self) -> Tensor:
        """[B]: the draft's probability of the token that it would choose, which a calibrated draft's acceptance equals."""
        return self._newest.softmax(-1).amax(-1)

    def keep(self, rows: Tensor) -> None:
        self.cache.select(rows)
        self._run, self._run_parents = self._run[rows], self._run_parents[rows]

    def _keep_accepted(self, tokens: list[list[int]]) -> None:
        """Of the last tree's entries, commit those on the path that was accepted: they need not be run again."""
        paths = []
        runs, parents = self._run.tolist(), self._run_parents.tolist()
        for row, length in enumerate(self.cache.lengths.tolist()):
            path: list[int] = []
            for token in tokens[row][length:-1]:
                above = path[-1] + 1 if path else 0  # nodes are numbered from 1, in the order in which they were run
                nodes = enumerate(zip(runs[row], parents[row], strict=True))
                found = next((i for i, node in nodes if node == (token, above)), None)
                if found is None:
                    break
                path.append(found)
            paths.append(path)
        self.cache.commit(paths)


class EagleDrafter(Drafter):
    """An EAGLE head drafts: true features for what the target has read, its own states below that."""

    def __init__(self, head: EagleHead) -> None:
        self.head = head
        self.taps = head.config.taps
        self.vocabulary = head.vocabulary
        self._late = head.config.inputs == "unshifted"  # each slot joins the token before the one that EAGLE joins

    def begin(self, batch: int, capacity: int) -> None:
        self.cache = KVCache(batch, capacity, self.head.config.layers, self.head.fc.weight.device)

    def propose(self, committed: Committed, shape: Shape, sampler: Sampler) -> Proposal:
        features = committed.taps if self.taps else committed.last
        assert features is not None
        counts = committed.counts
        self.cache.set_lengths(
            self.cache.lengths
        )  # drops the last tree: its states were the head's own, not true features
        if features.shape[1] == 0:  # prompts of one token: the target has read nothing, there is no feature yet
            return chain(_pending(committed)[:, None])
        # Slot t joins the target's feature of t with the token after it, so the newest slot reads the pending token.
        ends = [len(tokens) - self._late for tokens in committed.tokens]
        spans = zip(committed.tokens, ends, counts.tolist(), strict=True)
        joined, _ = _pad([tokens[end - count : end] for tokens, end, count in spans])
        slots = self.cache.slots(joined.shape[1])  # buffer index = slot = RoPE position
        visible = torch.ones(1, joined.shape[1], joined.shape[1], dtype=torch.bool).tril()
        state = self.head.step(joined, self.head.fuse(features), slots, cached_attention(self.cache, visible, slots))
        self.cache.set_lengths(self.cache.lengths + counts)
        self._states = _at_last(state, counts)[:, None]
        self._tokens = _pending(committed)[:, None]
        logits = self.head.logits(self._states[:, 0])
        return _grow_started(self, self.cache.lengths > 0, committed, logits, shape, sampler)

    def extend(self, tokens: Tensor, parents: Tensor, visible: Tensor, depth: int) -> Tensor:
        rows = torch.arange(len(tokens))[:, None]
        # The head's state of depth d stands for position slot + d, and the newest slot is the last committed entry.
        positions = (self.cache.lengths[:, None] - 1 + depth).expand(-1, tokens.shape[1])
        joined = self._tokens[rows, parents] if self._late else tokens
        attend = cached_attention(self.cache, visible, positions)
        state = self.head.step(joined, self._states[rows, parents], positions, attend)
        self.cache.hold(positions)
        self._states = torch.cat([self._states, state], dim=1)
        self._tokens = torch.cat([self._tokens, tokens], dim=1)
        return self.head.logits(state)

    def confidence(self) -> Tensor:
        """[B]: how likely the head thinks the next token below its newest node is to be accepted."""
        return self.head.confidence(self._states[:, -1]).sigmoid()

    def keep(self, rows: Tensor) -> None:
        self.cache.select(rows)


class MedusaDrafter(Drafter):
    """Medusa heads draft: every level of the tree from the newest state of the target's, whatever stands above it."""

    def __init__(self, heads: MedusaHeads) -> None:
        self.head = heads
        self.vocabulary = heads.vocabulary

    def propose(self, committed: Committed, shape: Shape, sampler: Sampler) -> Proposal:
        if shape.depth > self.head.config.heads:
            raise UserError(
                f"these Medusa heads draft {self.head.config.heads} tokens ahead, the tree asks for {shape.depth}; lower K, or "
                "train with more heads"
            )
        if committed.last.shape[1] == 0:  # prompts of one token: the target has read nothing yet
            return chain(_pending(committed)[:, None])
        newest = _at_last(committed.last, committed.counts)
        self._levels = [self.head.logits(self.head.state(newest, k), k) for k in range(shape.depth)]
        return _grow_started(self, committed.counts > 0, committed, self._levels[0], shape, sampler)

    def extend(self, tokens: Tensor, parents: Tensor, visible: Tensor, depth: int) -> Tensor:
        return self._levels[depth][:, None].expand(-1, tokens.shape[1], -1)


class PromptLookup(Drafter):
    """Proposes what followed the most recent earlier occurrence of the text's last n tokens (n = 3, then 2, then 1)."""

    own_tree = "chain"

    def __init__(self, longest: int = 3) -> None:
        self.longest = longest

    def propose(self, committed: Committed, shape: Shape, sampler: Sampler) -> Proposal:
        length = shape.depth
        found = [self._continuation(tokens, length) for tokens in committed.tokens]
        ids, sizes = _pad([[tokens[-1], *more] for tokens, more in zip(committed.tokens, found, strict=True)])
        return chain(ids, sizes)

    def _continuation(self, tokens: list[int], length: int) -> list[int]:
        for n in range(min(self.longest, len(tokens) - 1), 0, -1):
            suffix = tokens[-n:]
            for start in range(len(tokens) - n - 1, -1, -1):
                if tokens[start : start + n] == suffix:
                    return tokens[start + n : start + n + length]
        return []


def _grow_started(
    drafter: Any, started: Tensor, committed: Committed, logits: Tensor, shape: Shape, sampler: Sampler
) -> Proposal:
    """`grow`, in which rows that have no feature of the target's yet draft nothing beside others: as they would alone."""
    if bool(started.all()):
        return grow(drafter, _pending(committed), logits, shape, sampler)
    proposal = grow(drafter, _pending(committed), logits, shape, sampler.only(started.tolist()))
    return replace(proposal, sizes=torch.where(started, proposal.sizes, 1))


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


def _pending(committed: Committed) -> Tensor:
    """[B]: the token of each row that the target has not read."""
    return torch.tensor([tokens[-1] for tokens in committed.tokens])
