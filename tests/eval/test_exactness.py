"""The law of what is decoded at T > 0: χ² over whole three-token continuations of models with five tokens. FAULTS 55.

The target's own law is computed by enumeration. Each case draws 400 continuations and fails at p < 1e-6, so the whole file
raises a false alarm about once in ten thousand runs. Planted wrong rules, with more draws, must all be caught; the same code
without a fault must not.
"""

import numpy as np
import pytest
import torch
from law import FALSE_ALARM, PROMPT, V, enumerated_law, five_token_target, observed_counts, p_value

from draftsmith.eval import rules
from draftsmith.eval.decode import Decoding, decode
from draftsmith.eval.drafters import EagleDrafter, LMDrafter, MedusaDrafter, NoDraft, PromptLookup
from draftsmith.eval.lookahead import Lookahead
from draftsmith.eval.sampling import Sampler, draw
from draftsmith.eval.tree import Dynamic, chain_shape, level_shape
from draftsmith.models.draft import DraftLM
from draftsmith.models.eagle import new_eagle_head
from draftsmith.models.medusa import new_medusa_heads
from draftsmith.models.vocabulary import DraftVocabulary

SHAPES = {"chain": chain_shape(3), "static": level_shape([2, 2]), "dynamic": Dynamic(2, 3, 5)}
FILTERS = {"none": {}, "top-k": {"top_k": 2}, "top-p": {"top_p": 0.8}}


def drafters(target):
    full = DraftVocabulary.all_of(V)
    part = DraftVocabulary(torch.tensor([0, 2, 3]), V)
    head = new_eagle_head(target, (0, 1, 2), full)
    small = new_eagle_head(target, (0, 1, 2), part)
    return {
        "draft LM": LMDrafter(DraftLM.from_target_blocks(target, [0, 3])),
        "EAGLE-3": EagleDrafter(head),
        "EAGLE-3 with three of five tokens": EagleDrafter(small),
        "EAGLE-1": EagleDrafter(new_eagle_head(target, (), full, kind="eagle1")),
        "Medusa": MedusaDrafter(new_medusa_heads(target, full, 3)),
        "prompt lookup": PromptLookup(),
        "lookahead": Lookahead(window=2, grams=3, candidates=3),
        "oracle": LMDrafter(target),
    }


# Every shape meets every temperature and every filter, and every temperature every filter: a Latin square of the 27 cases.
TEMPERATURES = (0.5, 1.0, 1.5)
CASES = [
    (shape, temperature, sorted(FILTERS)[(i + j) % 3])
    for i, shape in enumerate(sorted(SHAPES))
    for j, temperature in enumerate(TEMPERATURES)
]


@pytest.mark.parametrize(("shape", "temperature", "filtered"), CASES)
def test_every_drafter_emits_the_targets_law(shape, temperature, filtered):
    check_law(shape, temperature, filtered, 400)


class Unsure(LMDrafter):
    """Its confidence depends on the newest token, as a trained one's does."""

    def propose(self, committed, shape, sampler):
        self.newest = torch.tensor([tokens[-1] for tokens in committed.tokens])
        return super().propose(committed, shape, sampler)

    def extend(self, tokens, parents, visible, depth):
        self.newest = tokens[:, -1]
        return super().extend(tokens, parents, visible, depth)

    def confidence(self):
        return torch.tensor([0.9, 0.2, 0.7, 0.4, 0.6])[self.newest]


def test_a_chain_that_stops_where_the_draft_is_unsure_keeps_the_law_and_does_stop():
    target, sampler = five_token_target(), Sampler(1.0)
    drafter, shape = Unsure(DraftLM.from_target_blocks(target, [0, 3])), chain_shape(3, 0.5)
    counts = observed_counts(target, drafter, shape, sampler, 1000, 5)
    assert p_value(counts, enumerated_law(target, sampler)) > FALSE_ALARM
    out = decode(target, drafter, [PROMPT] * 50, Decoding(shape, sampler, max_new_tokens=9, eos_ids=frozenset()))
    assert {step.drafted for result in out for step in result.trace} == {0, 1, 2, 3}
    alone = [
        decode(target, drafter, [PROMPT], Decoding(shape, sampler, max_new_tokens=9, eos_ids=frozenset()), names=[i])
        for i in range(5)
    ]
    assert [a.tokens for [a] in alone] == [o.tokens for o in out[:5]]


@pytest.mark.long
@pytest.mark.parametrize("filtered", sorted(FILTERS))
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_every_drafter_emits_the_targets_law_in_every_case(shape, temperature, filtered):
    """All 27 cases for all drafters, with three times the draws: `make test-long`."""
    check_law(shape, temperature, filtered, 1200)


def check_law(shape, temperature, filtered, draws):
    target = five_token_target()
    sampler = Sampler(temperature, **FILTERS[filtered])
    law = enumerated_law(target, sampler)
    for number, (name, drafter) in enumerate(drafters(target).items()):
        counts = observed_counts(target, drafter, SHAPES[shape], sampler, draws, seed=number)
        assert p_value(counts, law) > FALSE_ALARM, name


def test_plain_decoding_emits_the_targets_law():
    target = five_token_target()
    sampler = Sampler(1.0)
    counts = observed_counts(target, NoDraft(), chain_shape(1), sampler, 3000, seed=1)
    assert p_value(counts, enumerated_law(target, sampler)) > FALSE_ALARM


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.8}, {"presence_penalty": 1.5}, {"min_p": 0.3}])
def test_penalties_and_min_p_act_on_drafted_tokens_as_in_plain_decoding(options):
    """Both are sampled: two-sample χ² of speculative against plain decoding, and against a law that ignores the option."""
    target = five_token_target()
    sampler = Sampler(1.0, **options)
    plain = observed_counts(target, NoDraft(), chain_shape(1), sampler, 1500, seed=1)
    for shape in SHAPES.values():
        counts = observed_counts(target, LMDrafter(target), shape, sampler, 700, seed=2)
        both = plain + counts
        kept = both > 15
        statistic = 0.0
        for seen in (plain, counts):
            expected = both[kept] * seen.sum() / both.sum()
            statistic += ((seen[kept] - expected) ** 2 / expected).sum()
        freedom = torch.tensor((kept.sum() - 1) / 2.0)
        assert float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2.0))) > FALSE_ALARM
    assert p_value(plain, enumerated_law(target, Sampler(1.0))) < FALSE_ALARM


def wrong_rule(fault):
    """`rules.rejection` for sampled proposals, written again with one fault planted (None: without any)."""

    def rejection(tokens, parents, p, q, rng):
        children, path, node = rules.children_of(parents), [0], 0
        while True:
            residual, proposal, accepted = p[node], q[node], None
            for child in children[node]:
                x = tokens[child]
                chances = 2 if fault == "a token is tried twice" else 1
                if any(rng.random() * proposal[x] < residual[x] for _ in range(chances)):
                    accepted = child
                    break
                if fault == "no residual":
                    pass
                elif fault == "residual by softmax":
                    shifted = np.exp(residual - proposal)
                    residual = shifted / shifted.sum()
                else:
                    residual = np.maximum(residual - proposal, 0.0)
                    residual = residual / residual.sum()
                proposal = proposal.copy()
                proposal[x] = 0.0
                if fault != "q not renormalised":
                    proposal /= proposal.sum()
            if accepted is None:
                bonus = not children[node]
                law = q[path[-2]] if bonus and fault == "bonus from q" and len(path) > 1 else residual
                return rules.Accepted(path, draw(law, rng.random()), [0.0] * len(path))
            path.append(accepted)
            node = accepted

    return rejection


# The shape in which each fault shows best, and continuations enough for it. Renormalising q matters from the third sibling on.
FAULTS = {
    "no residual": (chain_shape(2), 1000),
    "residual by softmax": (chain_shape(2), 1000),
    "q not renormalised": (level_shape([3]), 2000),
    "bonus from q": (chain_shape(2), 1000),
    "a token is tried twice": (chain_shape(2), 1000),
}


def is_caught(rule, shape, draws, monkeypatch):
    target = five_token_target()
    drafter = LMDrafter(DraftLM.from_target_blocks(target, [0, 3]))
    sampler = Sampler(1.0)
    calls = []
    monkeypatch.setattr(rules, "rejection", lambda *arguments: calls.append(1) or rule(*arguments))
    counts = observed_counts(target, drafter, shape, sampler, draws, seed=3)
    assert calls  # it is the rule that decides
    return p_value(counts, enumerated_law(target, sampler)) < FALSE_ALARM


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_wrong_rule_is_caught(fault, monkeypatch):
    assert is_caught(wrong_rule(fault), *FAULTS[fault], monkeypatch)


@pytest.mark.parametrize(("shape", "draws"), [(chain_shape(2), 1000), (level_shape([3]), 2000)])
@pytest.mark.parametrize("rule", [rules.rejection, wrong_rule(None)], ids=["the rule", "its copy without fault"])
def test_the_right_rule_is_not_caught(rule, shape, draws, monkeypatch):
    assert not is_caught(rule, shape, draws, monkeypatch)


def test_typical_acceptance_is_marked_lossy_and_is_lossy():
    target = five_token_target()
    sampler = Sampler(1.0, typical=(0.3, 0.09))
    [out] = decode(
        target, LMDrafter(target), [PROMPT], Decoding(chain_shape(2), sampler, max_new_tokens=4, eos_ids=frozenset())
    )
    assert not out.lossless
    draft = LMDrafter(DraftLM.from_target_blocks(target, [0, 3]))
    counts = observed_counts(target, draft, chain_shape(2), sampler, 2000, seed=1)
    assert p_value(counts, enumerated_law(target, Sampler(1.0))) < FALSE_ALARM
