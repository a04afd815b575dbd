"""The decoder: exact against plain decoding, whatever drafts, however prompts are batched."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from kit import tiny_target

from draftsmith import speculative_decode
from draftsmith.errors import UserError
from draftsmith.eval import decode as decoding
from draftsmith.eval.decode import Decoding, decode
from draftsmith.eval.drafters import (
    Committed,
    Drafter,
    EagleDrafter,
    LMDrafter,
    MedusaDrafter,
    NoDraft,
    PromptLookup,
)
from draftsmith.eval.lookahead import Lookahead
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.tree import Dynamic, chain_shape, level_shape
from draftsmith.models.draft import DraftLM
from draftsmith.models.eagle import new_eagle_head
from draftsmith.models.kv import KVCache
from draftsmith.models.medusa import new_medusa_heads
from draftsmith.models.target import choose_taps
from draftsmith.models.vocabulary import DraftVocabulary

NO_EOS: frozenset[int] = frozenset()


class AlwaysWrong(Drafter):
    """Drafts the successor of the target's own choice in the vocabulary, which greedy decoding never accepts."""

    def __init__(self, target):
        self._oracle = LMDrafter(target)

    def begin(self, batch, capacity):
        self._oracle.begin(batch, capacity)

    def propose(self, committed, shape, sampler):
        best = self._oracle.propose(committed, shape, Sampler(0.0))
        wrong = (best.tokens + 1) % self._oracle.model.vocabulary
        return replace(best, tokens=torch.cat([best.tokens[:, :1], wrong[:, 1:]], dim=1))

    def keep(self, rows):
        self._oracle.keep(rows)


def drafters(target):
    full = DraftVocabulary.all_of(target.vocabulary)
    half = DraftVocabulary(torch.arange(0, target.vocabulary, 2), target.vocabulary)
    taps = choose_taps(target.blocks)
    return {
        "draft LM": LMDrafter(DraftLM.from_target_blocks(target, list(range(target.blocks - 1)))),
        "EAGLE-3": EagleDrafter(new_eagle_head(target, taps, full)),
        "EAGLE-3, half the vocabulary": EagleDrafter(new_eagle_head(target, taps, half)),
        "EAGLE-3.1, narrower, two layers": EagleDrafter(
            new_eagle_head(target, taps, full, width=16, layers=2, norm_taps=True, norm_state=True)
        ),
        "EAGLE-1": EagleDrafter(new_eagle_head(target, (), full, kind="eagle1", fc_bias=True)),
        "EAGLE-1, unshifted": EagleDrafter(new_eagle_head(target, (), full, kind="eagle1", inputs="unshifted")),
        "Medusa": MedusaDrafter(new_medusa_heads(target, half, 8)),
        "prompt lookup": PromptLookup(),
        "lookahead": Lookahead(window=4, grams=3, candidates=4),
        "oracle": LMDrafter(target),
        "always wrong": AlwaysWrong(target),
    }


def prompts(count, seed=0, longest=30):
    rng = np.random.default_rng(seed)
    return [rng.integers(6, 100, int(n)).tolist() for n in rng.integers(1, longest, count)]


def greedy_of_transformers(target, prompt, tokens):
    out = target.model.generate(torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, eos_token_id=None)
    return out[0, len(prompt) :].tolist()


def plain_greedy(target, texts, tokens):
    out = decode(
        target, NoDraft(), texts, Decoding(chain_shape(1), Sampler(0.0), max_new_tokens=tokens, eos_ids=NO_EOS)
    )
    return [result.tokens for result in out]


SHAPES = {
    "chain": (chain_shape(4),),
    "static": (level_shape([2, 2, 1]),),
    "dynamic": (Dynamic(3, 3, 8),),
}


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("flavour", ["plain", "gemma2", "mistral-window", "two-blocks"])
def test_greedy_output_equals_generate_token_for_token(flavour, shape):
    """FAULTS 52 and 54 (windows of 8 are crossed many times): every drafter, unequal prompts in one batch."""
    target = tiny_target(flavour)
    texts = prompts(5)
    expected = [greedy_of_transformers(target, text, 12) for text in texts]
    for name, drafter in drafters(target).items():
        for form in SHAPES[shape]:
            out = decode(target, drafter, texts, Decoding(form, Sampler(0.0), max_new_tokens=12, eos_ids=NO_EOS))
            assert [result.tokens for result in out] == expected, (name, form)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draft LM", "EAGLE-3", "prompt lookup", "lookahead", "oracle"])
def test_hundred_prompts_equal_plain_greedy_for_every_k_and_tree(name):
    """FAULTS 52."""
    target = tiny_target()
    texts = prompts(100, seed=1)
    plain = plain_greedy(target, texts, 8)
    # What lookahead proposes does not depend on the shape asked for.
    chains = [8] if name == "lookahead" else range(1, 9)
    for shape in (*map(chain_shape, chains), *SHAPES["static"], *SHAPES["dynamic"]):
        out = decode(
            target, drafters(target)[name], texts, Decoding(shape, Sampler(0.0), max_new_tokens=8, eos_ids=NO_EOS)
        )
        assert [result.tokens for result in out] == plain, shape


class Recording(LMDrafter):
    """A draft LM that remembers each proposal, and the tokens it was made for."""

    def propose(self, committed, shape, sampler):
        proposal = super().propose(committed, shape, sampler)
        self.made.append(([list(tokens) for tokens in committed.tokens], proposal))
        return proposal


@pytest.mark.parametrize("shape", ["static", "dynamic"])
def test_a_draft_lm_proposes_after_accepted_branches_what_a_fresh_one_proposes(shape):
    """What it keeps of the last tree is what it would compute again."""
    target = tiny_target()
    model = DraftLM.from_target_blocks(target, [0, 1, 2])
    drafter, [form] = Recording(model), SHAPES[shape]
    drafter.made = []
    decode(target, drafter, prompts(6), Decoding(form, Sampler(0.0), max_new_tokens=24, eos_ids=NO_EOS))
    off_the_first_branch = 0
    for (before, tree), (after, _) in pairwise(drafter.made):
        if len(before) == len(after):
            for row, (old, new) in enumerate(zip(before, after, strict=True)):
                first = tree.parents.expand(len(before), -1)[row].tolist().index(0)
                off_the_first_branch += len(new) - len(old) > 1 and new[len(old)] != int(tree.tokens[row, first])
    assert off_the_first_branch > 3  # entries had to move
    for tokens, proposal in drafter.made[1:]:
        fresh = LMDrafter(model)
        fresh.begin(len(tokens), 128)
        nothing = torch.zeros(len(tokens), dtype=torch.long)
        with torch.inference_mode():
            again = fresh.propose(
                Committed(tokens, torch.empty(len(tokens), 0, target.width), None, nothing), form, Sampler(0.0)
            )
        assert torch.equal(again.tokens, proposal.tokens)
        assert torch.equal(again.parents, proposal.parents)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("K", [1, 4])
def test_the_oracle_gives_exactly_k_plus_1_tokens_per_verify_except_last_steps(K, temperature):
    target = tiny_target()
    out = decode(
        target,
        LMDrafter(target),
        prompts(4),
        Decoding(chain_shape(K), Sampler(temperature), max_new_tokens=21, eos_ids=NO_EOS),
    )
    assert {step.emitted for result in out for step in result.trace[:-1]} == {K + 1}


def test_the_always_wrong_draft_gives_exactly_one_token_per_verify():
    target = tiny_target()
    out = decode(
        target,
        AlwaysWrong(target),
        prompts(3),
        Decoding(chain_shape(3), Sampler(0.0), max_new_tokens=12, eos_ids=NO_EOS),
    )
    assert {(step.emitted, step.accepted, step.drafted) for result in out for step in result.trace} == {(1, 0, 3)}


@pytest.mark.parametrize(("temperature", "shape"), [(0.0, chain_shape(3)), (0.8, level_shape([2, 1]))])
@pytest.mark.parametrize("name", ["draft LM", "EAGLE-3", "EAGLE-3, half the vocabulary", "prompt lookup", "lookahead"])
def test_a_prompt_decodes_alike_alone_in_a_batch_and_shuffled(name, temperature, shape):
    """FAULTS 63. A prompt of one token has no target states to start a head from."""
    target = tiny_target()
    texts = [*prompts(4, seed=2), [7]]
    drafter = drafters(target)[name]

    def run(order, batch):
        found = {}
        for start in range(0, len(order), batch):
            names = order[start : start + batch]
            out = decode(
                target,
                drafter,
                [texts[i] for i in names],
                Decoding(shape, Sampler(temperature), max_new_tokens=8, eos_ids=NO_EOS),
                names=names,
            )
            found |= {
                i: (r.tokens, [(v.drafted, v.accepted, v.emitted, v.hits) for v in r.trace])
                for i, r in zip(names, out, strict=True)
            }
        return found

    assert run([0, 1, 2, 3, 4], 1) == run([0, 1, 2, 3, 4], 3) == run([3, 4, 0, 2, 1], 5)


def test_output_and_finish_reason_are_right_for_eos_at_every_place_and_every_cap():
    """FAULTS 53: the token at index j is declared EOS, for every j; caps of j − 1, j, j + 1."""
    target = tiny_target()
    [text] = prompts(1, seed=3)
    [plain] = plain_greedy(target, [text], 8)
    for j, token in enumerate(plain):
        first = plain.index(token)
        for cap in {max(j, 1), j + 1, j + 2}:
            for drafter in (NoDraft(), LMDrafter(target), PromptLookup()):
                [out] = decode(
                    target,
                    drafter,
                    [text],
                    Decoding(chain_shape(5), Sampler(0.0), max_new_tokens=cap, eos_ids=frozenset({token})),
                )
                assert out.tokens == plain[: min(first + 1, cap)]
                assert out.finish_reason == ("stop" if first < cap else "length")
                assert sum(step.emitted for step in out.trace) == len(out.tokens)
                assert all(step.accepted <= step.emitted for step in out.trace)


def test_output_and_finish_reason_are_right_for_every_stop_string_of_the_text():
    """FAULTS 53: every suffix of the plain text, and a part of every one, as the stop string."""
    target = tiny_target()
    tokenizer = target.tokenizer
    [text] = prompts(1, seed=3)
    [plain] = plain_greedy(target, [text], 9)
    whole = tokenizer.decode(plain)
    strings = {whole[start:end] for start in range(len(whole)) for end in (start + 2, len(whole))}

    def run(drafter, string, **more):
        return decode(
            target,
            drafter,
            [text],
            Decoding(chain_shape(4), Sampler(0.0), max_new_tokens=len(plain), eos_ids=NO_EOS, stop=[string]),
            **more,
        )[0]

    oracle = LMDrafter(target)
    lengths = set()
    for string in sorted(strings):
        end = next(n for n in range(1, len(plain) + 1) if string in tokenizer.decode(plain[:n]))
        without, drafted = run(NoDraft(), string), run(oracle, string)
        assert without.tokens == drafted.tokens == plain[:end], string
        assert without.finish_reason == drafted.finish_reason == "stop"
        assert sum(step.emitted for step in drafted.trace) == end
        lengths.add(end)
    assert len(lengths) > 4  # of steps cut at several places
    absent = run(oracle, "no such text")
    assert (absent.tokens, absent.finish_reason) == (plain, "length")


def test_on_tokens_receives_exactly_the_emitted_tokens_in_order():
    target = tiny_target()
    texts = prompts(5, seed=5)
    stop_at = plain_greedy(target, texts[:1], 6)[0][-1]
    for shape in (chain_shape(4), *SHAPES["static"], *SHAPES["dynamic"]):
        heard = [[] for _ in texts]

        def listen(prompt, tokens, accepted, heard=heard):
            heard[prompt].append((tokens, accepted))

        out = decode(
            target,
            drafters(target)["draft LM"],
            texts,
            Decoding(shape, Sampler(0.0), max_new_tokens=14, eos_ids=frozenset({stop_at})),
            on_tokens=listen,
        )
        assert len({len(result.trace) for result in out}) > 1  # rows end at different steps
        for result, calls in zip(out, heard, strict=True):
            assert [token for tokens, _ in calls for token in tokens] == result.tokens
            assert [(len(tokens), accepted) for tokens, accepted in calls] == [
                (step.emitted, step.accepted) for step in result.trace
            ]


@pytest.mark.parametrize("flavour", ["plain", "mistral-window", "gemma2"])
def test_after_each_verify_the_cache_holds_the_committed_tokens_as_a_fresh_prefill_does(flavour, monkeypatch):
    """FAULTS 54. The draft LM is often wrong, so both rollback and acceptance occur."""
    target = tiny_target(flavour)
    caches = []
    new_cache = target.new_cache
    monkeypatch.setattr(target, "new_cache", lambda *a: caches.append(new_cache(*a)) or caches[-1])
    checked = []
    emit = decoding._emit

    def emit_and_remember(result, *arguments):
        emit(result, *arguments)
        checked.append((result.prompt + result.tokens, len(result.trace)))

    monkeypatch.setattr(decoding, "_emit", emit_and_remember)
    texts = [prompts(1, seed=4)[0] * 2]
    draft = LMDrafter(DraftLM.from_target_blocks(target, [0, 1, 2]))
    states = []
    kept = KVCache.commit

    def commit_and_compare(cache, paths):
        kept(cache, paths)
        if cache is caches[0]:
            tokens = checked[-1][0]
            committed = min(int(cache.lengths[0]), len(tokens))  # the last verify may reach beyond the cap
            fresh = new_cache(1, cache.capacity)
            target.forward(torch.tensor([tokens[:committed]]), cache=fresh, want_logits=False)
            for ours, reference in zip(cache.layers, fresh.layers, strict=True):
                torch.testing.assert_close(
                    ours.keys[:, :, :committed], reference.keys[:, :, :committed], atol=1e-5, rtol=0
                )
                torch.testing.assert_close(
                    ours.values[:, :, :committed], reference.values[:, :, :committed], atol=1e-5, rtol=0
                )
            states.append((committed, len(tokens)))

    monkeypatch.setattr(KVCache, "commit", commit_and_compare)
    decode(target, draft, texts, Decoding(chain_shape(4), Sampler(0.0), max_new_tokens=40, eos_ids=NO_EOS))
    assert len(states) > 5
    assert all(committed == tokens - 1 for committed, tokens in states[:-1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"K": 0}, "K 0"),
        ({"max_new_tokens": 0}, "max_new_tokens 0"),
        ({"prompt": []}, "empty"),
        ({"prompt": [7] * 250}, "context of 256"),
        ({"temperature": -0.5}, "temperature"),
    ],
)
def test_wrong_arguments_are_named_in_one_line(arguments, message):
    target = tiny_target()
    given = {"prompt": [7, 8], "K": 4, "max_new_tokens": 8, **arguments}
    with pytest.raises(UserError, match=message) as caught:
        speculative_decode(target, None, given.pop("prompt"), given.pop("K"), **given)
    assert "\n" not in str(caught.value)


def test_the_public_entry_takes_models_paths_and_text(tmp_path):
    target = tiny_target()
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    draft = DraftLM.from_target_blocks(target, [0, 3])
    draft.save(tmp_path / "draft", target)
    head = new_eagle_head(target, choose_taps(4), DraftVocabulary.all_of(target.vocabulary))
    head.save(tmp_path / "head")
    plain = speculative_decode(target, None, "def add", max_new_tokens=12)
    for form in (draft, draft.model, tmp_path / "draft", str(tmp_path / "head"), head):
        out = speculative_decode(tmp_path / "target", form, "def add", max_new_tokens=12)
        assert (out.tokens, out.text) == (plain.tokens, plain.text)
    assert plain.text == target.tokenizer.decode(plain.tokens)
    chat = speculative_decode(target.model, None, target.tokenizer.encode("def add"), max_new_tokens=3)
    assert chat.tokens == plain.tokens[:3]


def test_prompt_lookup_takes_the_most_recent_match_of_the_longest_suffix():
    lookup = PromptLookup()
    assert lookup._continuation([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], 2) == [8, 1]
    assert lookup._continuation([5, 6, 7], 4) == []
    assert lookup._continuation([4, 4, 4], 3) == [4]


@pytest.mark.parametrize("prompt", [[5, 150], [5, -1]])
def test_ids_that_the_target_does_not_have_are_named(prompt):
    with pytest.raises(UserError, match=f"token {prompt[1]}"):
        speculative_decode(tiny_target(), None, prompt, max_new_tokens=2)


def test_a_head_object_of_another_target_is_refused():
    target = tiny_target()
    head = new_eagle_head(target, choose_taps(4), DraftVocabulary.all_of(target.vocabulary))
    with pytest.raises(UserError, match="made for target"):
        speculative_decode(tiny_target(seed=3), head, [7, 8], max_new_tokens=2)
