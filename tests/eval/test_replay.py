"""Replay against the decoder: equal counts for deterministic drafts, equal expectations for sampled ones."""

from itertools import product

import numpy as np
import pytest
import torch
from kit import TAPS, a_head, near_copy, tiny_target

from draftsmith.eval.decode import Decoding, decode
from draftsmith.eval.drafters import EagleDrafter, LMDrafter, MedusaDrafter, NoDraft, PromptLookup
from draftsmith.eval.replay import profile, record, replay, sibling_acceptance, survival
from draftsmith.eval.rules import rejection
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.tree import Dynamic, chain_shape, level_shape, optimal_shape
from draftsmith.models.eagle import new_eagle_head
from draftsmith.models.medusa import new_medusa_heads
from draftsmith.models.vocabulary import DraftVocabulary

TOKENS, DEPTH = 12, 8


def drafters(target):
    half = DraftVocabulary(torch.arange(0, target.vocabulary, 2), target.vocabulary)
    return {
        "draft LM": LMDrafter(near_copy()),
        "EAGLE-3": EagleDrafter(a_head(target)),
        "EAGLE-3, half the vocabulary": EagleDrafter(new_eagle_head(target, TAPS, half)),
        "Medusa": MedusaDrafter(new_medusa_heads(target, half, DEPTH)),
        "prompt lookup": PromptLookup(),
        "oracle": LMDrafter(target),
    }


NAMES = list(drafters(tiny_target()))


def prompts(count=4, seed=0):
    rng = np.random.default_rng(seed)
    texts = [rng.integers(6, 100, int(n)).tolist() for n in rng.integers(2, 20, count - 2)]
    return [[7], [9, 8, 9, 8, 9, 8], *texts]


def run(target, drafter, shape, sampler, texts, seed=0, **more):
    more = {"max_new_tokens": TOKENS, "eos_ids": frozenset()} | more
    return decode(target, drafter, texts, Decoding(shape=shape, sampler=sampler, seed=seed, **more))


def counts(results):
    return [len(r.trace) for r in results], [sum(v.accepted for v in r.trace) for r in results]


STATIC = [level_shape([3, 2, 1]), level_shape([8, 2, 1, 1])]
DYNAMIC = [Dynamic(3, depth, budget) for depth, budget in ((1, 2), (3, 9), (4, 20))]


@pytest.mark.parametrize("name", NAMES)
def test_greedy_drafts_replay_to_the_very_counts_of_decoding(name):
    target, texts = tiny_target(), prompts()
    drafter = drafters(target)[name]
    depth, lengths = (DEPTH, range(1, DEPTH + 1)) if name == "draft LM" else (4, (3,))
    trees = STATIC + DYNAMIC if name in ("draft LM", "EAGLE-3") else [STATIC[0], DYNAMIC[1]]
    plain = run(target, NoDraft(), chain_shape(1), Sampler(0.0), texts)
    trace = record(target, drafter, plain, Sampler(0.0), depth=depth, pools=[(3, 1.0)])
    for shape in [chain_shape(K) for K in lengths] + ([] if name == "prompt lookup" else trees):
        scored = replay(trace, shape)
        verifies, accepted = counts(run(target, drafter, shape, Sampler(0.0), texts))
        assert scored.verifies.tolist() == verifies, shape
        assert scored.accepted.tolist() == accepted, shape


@pytest.mark.parametrize("shape", [chain_shape(3), Dynamic(3, 4, 3)], ids=["chain", "dynamic"])
def test_deterministic_drafts_of_sampled_texts_replay_to_the_counts_of_verifying_these_texts(shape):
    target, drafter = tiny_target(), LMDrafter(near_copy())
    plain = run(target, NoDraft(), chain_shape(1), Sampler(0.5), prompts()[1:3])
    trace = record(target, drafter, plain, Sampler(0.5), depth=4, pools=[(3, 1.0)])
    scored = replay(trace, shape)
    assert (scored.verifies.tolist(), scored.accepted.tolist()) == by_hand(target, drafter, plain, shape)
    assert scored.accepted.sum() > 0


def by_hand(target, drafter, plain, shape):
    """Verifies of given texts: the drafter is asked where each begins, and follows the text as far as it was drafted."""
    verifies, accepted = [], []
    for text in plain:
        at, n, kept = 0, 0, 0
        while at < len(text.tokens):
            [one] = run(
                target,
                Watched(drafter),
                shape,
                Sampler(0.0, greedy_draft=True),
                [text.prompt + text.tokens[:at]],
                max_new_tokens=1,
            )
            del one
            proposal = Watched.last
            node, length = 0, 0
            while at + length < len(text.tokens):
                here = [
                    i
                    for i in range(1, int(proposal.sizes[0]))
                    if proposal.parents[0, i] == node and proposal.tokens[0, i] == text.tokens[at + length]
                ]
                if not here:
                    break
                node, length = here[0], length + 1
            n, kept, at = n + 1, kept + length, at + length + 1
        verifies.append(n)
        accepted.append(kept)
    return verifies, accepted


class Watched(NoDraft):
    """Keeps what the inner drafter proposed first."""

    last = None

    def __init__(self, inner):
        self.inner, self.taps, self.most_nodes = inner, inner.taps, inner.most_nodes

    def begin(self, batch, capacity):
        self.inner.begin(batch, capacity)

    def keep(self, rows):
        self.inner.keep(rows)

    def propose(self, committed, shape, sampler):
        Watched.last = self.inner.propose(committed, shape, sampler)
        return Watched.last


def test_a_text_that_ends_in_eos_or_at_a_cap_is_cut_as_decoding_cuts_it():
    target, drafter = tiny_target(), LMDrafter(near_copy())
    texts = prompts()
    eos = frozenset({run(target, NoDraft(), chain_shape(1), Sampler(0.0), texts)[2].tokens[6]})
    plain = run(target, NoDraft(), chain_shape(1), Sampler(0.0), texts, eos_ids=eos)
    assert len({len(r.tokens) for r in plain}) > 1
    trace = record(target, drafter, plain, Sampler(0.0), depth=5)
    for K in (1, 3, 5):
        decoded = run(target, drafter, chain_shape(K), Sampler(0.0), texts, eos_ids=eos)
        assert [r.tokens for r in decoded] == [r.tokens for r in plain]
        assert replay(trace, chain_shape(K)).verifies.tolist() == counts(decoded)[0]
        assert replay(trace, chain_shape(K)).accepted.tolist() == counts(decoded)[1]


@pytest.mark.parametrize(
    ("name", "shape"),
    [("draft LM", chain_shape(3)), ("EAGLE-3, half the vocabulary", level_shape([3, 2]))],
    ids=["chain", "tree"],
)
def test_sampled_drafts_replay_to_the_mean_of_many_decodings(name, shape):
    """Verifies of 10 seeds against the replay of the texts that were decoded: their differences have mean 0.
    Their mean is within 4 standard errors of 0 for both cases in all but about 1 of 150 choices of seeds (t, 9 degrees)."""
    target = tiny_target()
    drafter, sampler = drafters(target)[name], Sampler(1.0)
    differences = []
    for seed in range(10):
        decoded = run(target, drafter, shape, sampler, prompts(), seed=seed)
        trace = record(target, drafter, decoded, sampler, depth=shape.depth, siblings=3, seed=seed)
        scored = replay(trace, shape, sampled=True)
        differences.append(scored.verifies.sum() - sum(len(r.trace) for r in decoded))
    differences = np.array(differences)
    assert differences.std() > 0.5, "the test would compare constants"
    assert abs(differences.mean()) < 4 * differences.std(ddof=1) / np.sqrt(len(differences))


def test_the_acceptance_of_each_sibling_equals_the_rejection_rule_simulated():
    """12 000 draws of three siblings: a token of p = 0.1 is emitted 1 200 times, so every standard error is below 0.015."""
    rng = np.random.default_rng(0)
    p, q = np.array([0.45, 0.25, 0.2, 0.1]), np.array([0.1, 0.5, 0.1, 0.3])
    hits, emitted = np.zeros((4, 3)), np.zeros(4)
    for _ in range(12_000):
        left, tokens = q.copy(), [0]
        for _ in range(3):
            tokens.append(int(rng.choice(4, p=left / left.sum())))
            left[tokens[-1]] = 0
        result = rejection(tokens, [-1, 0, 0, 0], np.tile(p, (4, 1)), np.tile(q, (4, 1)), rng)
        token = tokens[result.path[1]] if len(result.path) > 1 else result.following
        emitted[token] += 1
        if len(result.path) > 1:
            hits[token, result.path[1] - 1] += 1
    many = 4000
    for token in range(4):
        found = sibling_acceptance(
            torch.tensor(p).repeat(many, 1),
            torch.tensor(q).repeat(many, 1),
            torch.full((many, 1), token),
            3,
            torch.Generator().manual_seed(0),
        )
        assert found.mean(0).numpy() == pytest.approx(hits[token] / emitted[token], abs=0.06)
        assert found[:, 0].numpy() == pytest.approx(min(1.0, q[token] / p[token]))


def test_the_first_sibling_alone_is_the_chains_rule_and_an_equal_draft_is_always_accepted():
    p = torch.rand(5, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p = p / p.sum(1, keepdim=True)
    assert sibling_acceptance(p, p, torch.arange(5)[:, None], 3).numpy() == pytest.approx(
        np.tile([1.0, 0.0, 0.0], (5, 1))
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_oracles_profile_is_the_first_child_at_every_depth_whether_drawn_or_likeliest(temperature):
    target = tiny_target()
    plain = run(target, NoDraft(), chain_shape(1), Sampler(temperature), prompts(2))
    trace = record(target, LMDrafter(target), plain, Sampler(temperature), depth=3, siblings=2)
    found = profile(trace, 2, sampled=temperature > 0)
    assert np.array(found) == pytest.approx(np.array([[1.0, 0.0]] * 3), abs=1e-5)


def test_the_profile_of_ranks_makes_the_tree_that_is_best_on_the_recorded_texts():
    """Of all trees of 4 nodes from 1 000 random profiles, none emits more on the first verify than the one of the profile."""
    target, drafter = tiny_target(), LMDrafter(near_copy(0.06))
    plain = run(target, NoDraft(), chain_shape(1), Sampler(0.0), prompts(8))
    trace = record(target, drafter, plain, Sampler(0.0), depth=3)
    best = optimal_shape(profile(trace, 4), 4)
    rng = np.random.default_rng(0)
    others = {optimal_shape(np.sort(rng.random((3, 4)), axis=1)[:, ::-1].tolist(), 4) for _ in range(1000)}
    assert len(others) > 4
    mean = {shape: survival(trace, shape).sum() for shape in others | {best}}
    assert mean[best] >= 0.97 * max(mean.values())  # the profile takes positions as independent, the texts do not


def test_what_a_recording_does_not_cover_is_refused():
    target, drafter = tiny_target(), LMDrafter(near_copy())
    plain = run(target, NoDraft(), chain_shape(1), Sampler(0.0), prompts())
    trace = record(target, drafter, plain, Sampler(0.0), depth=2, pools=[(3, 1.0)])
    for shape, sampled in (
        (chain_shape(3), False),
        (Dynamic(2, 2, 3), False),
        (Dynamic(3, 2, 3, 0.5), False),
        (chain_shape(2), True),
    ):
        with pytest.raises(ValueError, match=r"record|cover"):
            replay(trace, shape, sampled)


def test_the_visits_of_a_text_follow_from_the_acceptances_by_enumeration():
    """All ways to accept or reject along a short text, added up by brute force, give the expected verifies of the recursion."""
    target, drafter = tiny_target(), LMDrafter(near_copy())
    plain = run(target, NoDraft(), chain_shape(1), Sampler(1.0), [[7, 9, 11]], max_new_tokens=5)
    trace = record(target, drafter, plain, Sampler(1.0), depth=2)
    chance = trace.accept[0, :, :, 0]
    total = 0.0
    for path in product(range(3), repeat=5):  # how many each of up to five verifies accepts
        at, probability, verifies = 0, 1.0, 0
        for accepted in path:
            if at >= 5:
                probability *= accepted == 0  # count each way once
                continue
            alive = [chance[at, 0], chance[at, 0] * chance[at, 1], 0.0]
            probability *= [1 - alive[0], alive[0] - alive[1], alive[1]][accepted]
            at, verifies = at + accepted + 1, verifies + 1
        total += probability * verifies
    assert replay(trace, chain_shape(2), sampled=True).verifies[0] == pytest.approx(total)
