"""Decoding without decoding: what every chain and tree would have accepted, from one recording per drafter and temperature.

`record` walks along texts that the target wrote by itself (plain decoding) and asks the drafter, at *every* position, for its
proposal below the true prefix. `survival` scores a shape on the recording, and `replay` lets a decoder start a verify wherever its
last one ended.

Why that suffices. A proposal depends on the committed text alone: what a drafter keeps of earlier proposals are keys and values of
accepted tokens, which are the same however they came about (a drafter that learns from its rejections, such as lookahead, cannot be
replayed). A verify can only accept tokens of the text that is emitted, so of each proposal nothing counts but the branch along it:

- Deterministic proposals, at every temperature: a node on that branch is accepted iff it was proposed. Below a shape's node the
  child of rank r is the draft's r-th likeliest token, so a table of the ranks of the true tokens, the draft having run on the true
  ones before, scores every chain and static tree. A dynamic tree holds a node iff its place in the pool, ordered by path
  product, is within the budget; the pool of `depth` levels begins with that of fewer, so one recording per width scores every
  depth and budget. Exact: the counts of `decode` on the same text (to the last bit of ties between logits).
- Sampled chains: the draft proposes x with q(x) and it stays with min(1, p(x) / q(x)), so P(x accepted | x emitted) is
  min(p(x), q(x)) / p(x), and what follows x is drawn from p either way. Given the text, acceptances are therefore independent and
  known: expected verifies are exact, no draft need be drawn, and only the choice of texts is random.
- Sampled siblings (without replacement): the same with the residual and the renormalised q of each stage, which depend on the
  siblings rejected before. These are drawn (`sibling_acceptance`): unbiased, with the noise of that draw.

Knows models, texts and shapes; knows nothing of time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from draftsmith.eval.decode import Decoded
from draftsmith.eval.drafters import Committed, Drafter
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.tree import Dynamic, Shape, Static, chain_shape
from draftsmith.models.target import Target

NEVER = np.iinfo(np.int32).max  # the rank, or place, of a token that is not proposed at all


@dataclass
class Trace:
    """One drafter along N texts of at most T new tokens, D tokens ahead. Position t: t new tokens are committed.

    lengths [N]; prompts [N]: tokens of each prompt. ranks [N, T, D]: the rank of the text's token t + d with the draft that has
    run on the d tokens before it; NEVER beyond the text's end and from the first token on that the draft cannot say. accept [N, T,
    D, S] (temperatures above 0): the probability that this token is accepted as the s-th sampled sibling, given that it is emitted.
    places: for each (width, confidence temperature) [N, T, D, D], at [k, d] the place of the node of depth d + 1 in the pool of
    k + 1 levels.
    sizes [N, T]: how many tokens were offered: fewer than D where a drafter found no more. grows: whether it can make trees.
    """

    lengths: np.ndarray
    prompts: np.ndarray
    ranks: np.ndarray
    sizes: np.ndarray
    accept: np.ndarray | None = None
    places: dict[tuple[int, float], np.ndarray] = field(default_factory=dict)
    grows: bool = True

    @property
    def depth(self) -> int:
        return self.ranks.shape[2]


@dataclass
class Along(Sampler):
    """Drafts the text itself, one row per text, and notes what the draft would have made of each of its tokens.

    truth [B, D] the next tokens in the draft's ids, −1 where there is none. Above temperature 0, p[d] [B, V] is the target's
    distribution of token d, over the draft's ids first (`outside` are the rest), and generator draws rejected siblings.
    """

    truth: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    p: list[Tensor] = field(default_factory=list)
    siblings: int = 1
    generator: torch.Generator | None = None
    ranks: list[Tensor] = field(default_factory=list)
    accept: list[Tensor] = field(default_factory=list)

    def draft(self, logits: Tensor, count: int = 1) -> tuple[Tensor, None]:
        depth = len(self.ranks)
        token = self.truth[:, depth].clamp(min=0)[:, None]
        self.ranks.append((logits > logits.gather(1, token)).sum(1))
        if self.p:
            q = self.probabilities(logits)
            self.accept.append(sibling_acceptance(self.p[depth], q, token, self.siblings, self.generator))
        return token, None


def sibling_acceptance(
    p: Tensor, q: Tensor, token: Tensor, siblings: int, generator: torch.Generator | None = None
) -> Tensor:
    """[B, S]: the probability that `token` [B, 1] is accepted as sibling s, given that it is emitted.

    p [B, V]: the target's; q [B, V_d ≤ V]: the draft's, over p's first V_d ids. Stage s is reached with probability S_s (all
    siblings before it rejected), accepts the token with min(r, q_s), where r is the residual and q_s is q without the siblings
    before it, and what it rejects is distributed as (q_s − r)₊. All is divided by the token's own p. Only rejected siblings are
    drawn.
    """
    given, residual, reach = p.gather(1, token).squeeze(1), p, torch.ones(len(p), dtype=p.dtype)
    found, wide = [], p.new_zeros(p.shape)
    wide[:, : q.shape[1]] = q
    for stage in range(siblings):
        both = torch.minimum(residual, wide)
        found.append(reach * both.gather(1, token).squeeze(1) / given.clamp(min=torch.finfo(p.dtype).tiny))
        if stage == siblings - 1:
            break
        rejected = (wide - both).clamp(min=0)
        chance = rejected.sum(1)
        going = chance > 1e-12  # else q = r: the stage always accepts, or q is used up
        reach = torch.where(going, reach * chance, 0.0)
        drawn = torch.multinomial(torch.where(going[:, None], rejected, 1.0), 1, generator=generator)
        left = (residual - wide).clamp(min=0)
        residual = left / left.sum(1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
        wide = wide.scatter(1, drawn, 0.0)
        wide = wide / wide.sum(1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
    return torch.stack(found, 1)


@torch.inference_mode()
def record(
    target: Target,
    drafter: Drafter,
    texts: Sequence[Decoded],
    sampler: Sampler,
    *,
    depth: int,
    siblings: int = 1,
    pools: Sequence[tuple[int, float]] = (),
    seed: int = 0,
) -> Trace:
    """The recording of one drafter along `texts`, which plain decoding with `sampler` (whose temperature it is) has written.

    depth: tokens ahead, 1 or more; siblings: of a node at most, when sampling; pools: the dynamic trees' (width, confidence
    temperature), walked once more each.
    """
    states = _read(target, drafter, texts)
    count, longest = len(texts), max(len(text.tokens) for text in texts)
    shape3, grows = (count, longest, depth), hasattr(drafter, "vocabulary")  # what `growth.Grower` asks for
    trace = Trace(
        np.array([len(text.tokens) for text in texts]),
        np.array([len(text.prompt) for text in texts]),
        np.full(shape3, NEVER, dtype=np.int32),
        np.zeros((count, longest), dtype=np.int32),
        np.zeros((*shape3, siblings)) if sampler.temperature > 0 and grows else None,
        grows=grows,
    )
    generator = torch.Generator().manual_seed(seed)
    ahead = None if trace.accept is None else _Ahead(target, drafter, texts, states, sampler)
    for position, rows, committed in _walk(drafter, texts, states, depth):
        if not grows:
            _note_chain(trace, drafter, texts, position, rows, committed, sampler)
            continue
        truth = _ahead(drafter, texts, rows, position, depth)
        p = ahead(rows, position, depth) if ahead is not None else []
        along = Along(sampler.temperature, sampler.top_k, sampler.top_p, True, truth=truth, p=p, siblings=siblings)
        along.generator = generator
        along.streams = [np.random.default_rng(0)] * len(rows)
        proposal = drafter.propose(committed, chain_shape(depth), along)
        offered = ((truth >= 0).cumprod(1) * (proposal.sizes > 1)[:, None]).bool()
        trace.sizes[rows, position] = np.where(proposal.sizes > 1, depth, 0)
        ranks = torch.where(offered, torch.stack(along.ranks, 1), NEVER)
        trace.ranks[rows, position] = ranks.numpy()
        if trace.accept is not None:
            trace.accept[rows, position] = (torch.stack(along.accept, 1) * offered[..., None]).numpy()
    for width, sharpness in pools if grows else ():
        trace.places[width, sharpness] = _record_pool(drafter, texts, states, depth, width, sharpness)
    return trace


@dataclass(frozen=True)
class _States:
    """The target's states after each token of the texts, padded on the right. last [N, L, W]; taps [N, L, A, W] or None."""

    last: Tensor
    taps: Tensor | None


def _read(target: Target, drafter: Drafter, texts: Sequence[Decoded]) -> _States:
    whole = [text.prompt + text.tokens for text in texts]
    width = max(map(len, whole))
    ids = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in whole])
    out = target.forward(ids, drafter.taps, want_logits=False)
    return _States(out.last, out.taps)


def _walk(
    drafter: Drafter, texts: Sequence[Decoded], states: _States, depth: int, run: int = 0
) -> Iterator[tuple[int, np.ndarray, Committed]]:
    """(position, rows still within their text, what is committed there), as if every verify had emitted one token."""
    lengths = np.array([len(text.tokens) for text in texts])
    longest = max(len(text.prompt) + len(text.tokens) for text in texts)
    drafter.begin(len(texts), longest + max(run, depth, drafter.most_nodes) + 2)
    rows: np.ndarray = np.arange(len(texts))
    for position in range(int(lengths.max())):
        going = np.flatnonzero(lengths[rows] > position)
        if len(going) < len(rows):
            drafter.keep(torch.from_numpy(going))
            rows = rows[going]
        ends = [len(texts[row].prompt) - 1 + position for row in rows.tolist()]
        starts = [0 if position == 0 else end - 1 for end in ends]
        counts = torch.tensor([end - start for start, end in zip(starts, ends, strict=True)])
        places = torch.tensor(starts)[:, None] + torch.arange(int(counts.max()))
        at = torch.from_numpy(rows)[:, None]
        tokens = [texts[row].prompt + texts[row].tokens[:position] for row in rows.tolist()]
        taps = None if states.taps is None else states.taps[at, places]
        yield position, rows, Committed(tokens, states.last[at, places], taps, counts)


def _idle(temperature: float, rows: np.ndarray) -> Sampler:
    """A sampler for deterministic proposals, which draw nothing from its streams."""
    return Sampler(temperature, greedy_draft=True, streams=[np.random.default_rng(0)] * len(rows))


def _ahead(drafter: Drafter, texts: Sequence[Decoded], rows: np.ndarray, position: int, depth: int) -> Tensor:
    """[B, D]: the next tokens of each text in the draft's ids; −1 beyond its end and where the draft does not have the token."""
    following = torch.full((len(rows), depth), -1)
    for place, row in enumerate(rows):
        tokens = torch.tensor(texts[row].tokens[position : position + depth])
        following[place, : len(tokens)] = drafter.vocabulary.to_draft(tokens)  # type: ignore[attr-defined]
    return following


class _Ahead:
    """p of the next D tokens of each text as a window that moves along: every p is computed once. The draft's ids first."""

    def __init__(
        self, target: Target, drafter: Drafter, texts: Sequence[Decoded], states: _States, sampler: Sampler
    ) -> None:
        self._target, self._states, self._sampler = target, states, sampler
        self._vocabulary = drafter.vocabulary  # type: ignore[attr-defined]
        self._prompts = torch.tensor([len(text.prompt) for text in texts])
        self._window: dict[int, Tensor] = {}

    def __call__(self, rows: np.ndarray, position: int, depth: int) -> list[Tensor]:
        """D times [B, V]: of the tokens at `position` … `position` + D − 1."""
        wanted = range(position, position + depth)
        self._window = {at: self._window[at] if at in self._window else self._p(at) for at in wanted}
        return [self._window[at][torch.from_numpy(rows)] for at in wanted]

    def _p(self, at: int) -> Tensor:
        # The token at `at` is drawn after the one before it has been read; beyond a text nothing is asked.
        places = (self._prompts - 1 + at).clamp(max=self._states.last.shape[1] - 1)
        logits = self._target.head(self._states.last[torch.arange(len(places)), places])
        logits[..., self._target.usable :] = float("-inf")
        p = self._sampler.probabilities(logits)
        return p if self._vocabulary.full else p[:, self._vocabulary.draft_first]


def _note_chain(
    trace: Trace,
    drafter: Drafter,
    texts: Sequence[Decoded],
    position: int,
    rows: np.ndarray,
    committed: Committed,
    sampler: Sampler,
) -> None:
    """A drafter that does not grow trees: its chain, whose shorter versions are its beginnings. A hit has rank 0."""
    proposal = drafter.propose(committed, chain_shape(trace.depth), _idle(sampler.temperature, rows))
    for place, row in enumerate(rows):
        size = int(proposal.sizes[place]) - 1
        trace.sizes[row, position] = size
        drafted = proposal.tokens[place, 1 : size + 1].tolist()
        for d, (token, true) in enumerate(zip(drafted, texts[row].tokens[position:], strict=False)):
            if token != true:
                break
            trace.ranks[row, position, d] = 0


def _record_pool(
    drafter: Drafter,
    texts: Sequence[Decoded],
    states: _States,
    depth: int,
    width: int,
    sharpness: float,
) -> np.ndarray:
    """`Trace.places` of one width: the whole pool is proposed at every position, and the true branch looked up in it."""
    most = width + (depth - 1) * width**2
    shape = Dynamic(width, depth, most, sharpness)
    longest = max(len(text.tokens) for text in texts)
    places = np.full((len(texts), longest, depth, depth), NEVER, dtype=np.int32)
    for position, rows, committed in _walk(drafter, texts, states, depth, shape.run):
        proposal = drafter.propose(committed, shape, _idle(0.0, rows))
        assert proposal.scores is not None
        tokens = proposal.tokens[:, 1:].numpy()
        parents = proposal.parents[:, 1:].numpy()
        scores = proposal.scores[:, 1:].numpy()
        level_ends = np.arange(depth) * width**2 + width - 1
        # The true branch's node so far: 0 is the root, −1 it is not in the pool.
        node = np.zeros(len(rows), dtype=np.int64)
        node[(proposal.sizes <= 1).numpy()] = -1
        everything = np.arange(most)
        for d in range(depth):
            truth = np.array([next(iter(texts[row].tokens[position + d : position + d + 1]), -1) for row in rows])
            match = (parents == node[:, None]) & (tokens == truth[:, None]) & (node >= 0)[:, None]
            there, index = match.any(1), match.argmax(1)
            node = np.where(there, index + 1, -1)
            own = np.take_along_axis(scores, index[:, None], 1)
            # Before it in the order: a higher product, or an equal one that stands earlier in the pool.
            before = (scores > own) | ((scores == own) & (everything < index[:, None]))
            place = before.cumsum(1)[:, level_ends]
            places[rows, position, :, d] = np.where(there[:, None], place, NEVER)
    for k in range(depth):
        places[:, :, k, k + 1 :] = NEVER  # a pool of k + 1 levels has no deeper nodes
    return places


def survival(trace: Trace, shape: Shape, sampled: bool = False) -> np.ndarray:
    """[N, T, D]: the probability that a verify begun at t accepts at least d + 1 tokens, given the text.

    sampled: the shape's tokens are drawn from q (see `record`: the texts must be of a temperature above 0). Raises ValueError for a
    shape that the recording does not cover.
    """
    if shape.depth > trace.depth:
        raise ValueError(f"{shape} drafts {shape.depth} tokens ahead, the recording {trace.depth}")
    found = np.zeros(trace.ranks.shape)
    if isinstance(shape, Dynamic):
        pool = trace.places.get((shape.width, shape.confidence_temperature))
        if pool is None or sampled:
            raise ValueError(
                f"{shape}: only deterministic trees of the recorded widths {list(trace.places)} are covered"
            )
        found[:, :, : shape.depth] = (pool[:, :, shape.depth - 1, : shape.depth] < shape.budget).cumprod(2)
        return found
    ranks = _sibling_numbers(shape)
    if sampled and (trace.accept is None or max(ranks) >= trace.accept.shape[3]):
        raise ValueError(f"{shape}: sampled siblings up to number {max(ranks)} were not recorded")
    reach = [np.ones(trace.ranks.shape[:2])]
    for node in range(1, len(shape.parents)):
        d, r = shape.depths[node] - 1, ranks[node]
        here = trace.accept[:, :, d, r] if sampled and trace.accept is not None else trace.ranks[:, :, d] == r
        reach.append(reach[shape.parents[node]] * here)
        found[:, :, d] += reach[-1]
    return found


def _sibling_numbers(shape: Static) -> list[int]:
    numbers = [0] * len(shape.parents)
    for children in shape.children:
        for number, child in enumerate(children):
            numbers[child] = number
    return numbers


@dataclass(frozen=True)
class Replayed:
    """Expected counts per text. visits [N, T]: the probability that a verify begins at t; verifies, tokens, accepted [N]; squares
    [N]: of the verifies' accepted tokens, added up."""

    visits: np.ndarray
    tokens: np.ndarray
    accepted: np.ndarray
    squares: np.ndarray

    @property
    def verifies(self) -> np.ndarray:
        return self.visits.sum(1)


def replay(trace: Trace, shape: Shape, sampled: bool = False) -> Replayed:
    """Decode the recorded texts with `shape`: from t, a verify that accepts a tokens emits a + 1 and the next begins behind them.

    The last emitted tokens are cut at the text's end, as `decode` cuts them.
    """
    survives = survival(trace, shape, sampled)
    count, longest, depth = survives.shape
    # P(exactly a accepted), a = 0 … D.
    edges = np.concatenate([np.ones((count, longest, 1)), survives, np.zeros((count, longest, 1))], axis=2)
    exactly = edges[:, :, :-1] - edges[:, :, 1:]
    visits = np.zeros((count, longest + depth + 1))
    visits[:, 0] = 1.0
    accepted, squares = np.zeros(count), np.zeros(count)
    for t in range(longest):
        inside = visits[:, t] * (trace.lengths > t)
        visits[:, t] = inside
        for a in range(depth + 1):
            visits[:, t + a + 1] += inside * exactly[:, t, a]
            accepted += inside * exactly[:, t, a] * a  # never beyond the text's end: nothing is accepted there
            squares += inside * exactly[:, t, a] * a**2
    return Replayed(visits[:, :longest], trace.lengths, accepted, squares)


def profile(trace: Trace, width: int, sampled: bool = False) -> list[list[float]]:
    """profile[d][r], r < width: how often, after d tokens of the text, the next one is accepted as a node's child r.

    `tree.optimal_shape` is made from it. Child r is the draft's r-th likeliest token or, sampled, the r-th one drawn from q; their
    shares fall but for noise, which is taken off.
    """
    shares = []
    for d in range(trace.depth):
        asked = max(int((trace.lengths[:, None] > np.arange(trace.ranks.shape[1]) + d).sum()), 1)
        if sampled:
            assert trace.accept is not None
            shares.append(np.minimum.accumulate(trace.accept[:, :, d, :width].sum((0, 1)) / asked).tolist())
        else:
            shares.append([int((trace.ranks[:, :, d] == r).sum()) / asked for r in range(width)])
    return shares
