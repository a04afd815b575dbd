"""The evaluation: what it reports, that it catches a decoder that is not exact, and which prompts it takes."""

import numpy as np
import pytest
from kit import tiny_target

from draftsmith.data.rows import Row
from draftsmith.errors import UserError
from draftsmith.eval import rules
from draftsmith.eval.acceptance import PlainRuns, evaluate, held_out_prompts
from draftsmith.eval.drafters import LMDrafter
from draftsmith.eval.prompts import Question
from draftsmith.eval.settings import EvalSettings
from draftsmith.models.draft import DraftLM

SETTINGS = EvalSettings(K=3, prompts=4, prompt_tokens=6, max_new_tokens=12, batch=3, timed_prompts=1)


def rows(count=10, length=20, seed=0):
    """Texts of `code` and dialogues of `chat` in turn; a dialogue's answer begins at token 8."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        ids = rng.integers(6, 100, length).astype(np.int32)
        first = 8 if i % 2 else 1
        made.append(Row(ids, np.arange(length) >= first, "chat" if i % 2 else "code", f"d{i}"))
    return made


def prompts(target):
    return held_out_prompts(rows(), SETTINGS, target.context)


def test_a_texts_prompt_is_its_beginning_and_a_dialogues_all_before_its_answer():
    made = rows()
    found = held_out_prompts(made, SETTINGS, 256)
    assert {domain: len(texts) for domain, texts in found.items()} == {"code": 4, "chat": 4}
    assert found["code"][1] == made[2].token_ids[:6].tolist()
    assert found["chat"][1] == made[3].token_ids[:8].tolist()


def test_every_result_has_the_documented_keys_and_states_identical():
    target = tiny_target()
    draft = LMDrafter(DraftLM.from_target_blocks(target, [0, 3]))
    results = evaluate(target, draft, prompts(target), SETTINGS, PlainRuns())
    assert [(r["domain"], r["temperature"]) for r in results] == [
        ("code", 0.0),
        ("code", 1.0),
        ("chat", 0.0),
        ("chat", 1.0),
    ]
    for result in results:
        assert (result["K"], result["tree"], result["prompts"]) == (3, "chain", 4)
        assert set(result["tokens_per_verify"]) == {"value", "low", "high", "count"}
        assert len(result["n_alpha"]) == len(result["survival"]) == 3
        assert result["tokens"] <= 48
    greedy = results[0]
    assert greedy["identical"] == [4, 4]
    for name in ("speedup", "draft_cost", "verify_cost", "speedup_predicted"):
        assert greedy[name]["value"] > 0
        assert greedy[name]["count"] == 1
    assert greedy["alpha_teacher_forced"] == {}, "no text was given"
    assert "identical" not in results[1]


def test_a_decoder_that_accepts_a_wrong_token_is_not_called_identical(monkeypatch):
    """FAULTS 57: the check can fail."""
    target = tiny_target()
    draft = LMDrafter(DraftLM.from_target_blocks(target, [0, 3]))
    honest = rules.greedy

    def lenient(tokens, parents, best):
        accepted = honest(tokens, parents, best)
        if len(accepted.path) == 1 and len(tokens) > 1:
            return rules.Accepted([0, 1], best[1], [1.0])
        return accepted

    plain = PlainRuns()
    evaluate(target, draft, prompts(target), SETTINGS, plain)
    monkeypatch.setattr(rules, "greedy", lenient)
    results = evaluate(target, draft, prompts(target), SETTINGS, plain)
    assert results[0]["identical"][0] < 4


def test_evaluating_twice_gives_the_same_numbers():
    """FAULTS 61."""
    target = tiny_target()
    draft = LMDrafter(DraftLM.from_target_blocks(target, [0, 3]))
    settings = SETTINGS.model_copy(update={"timed_prompts": 0})
    first, second = (evaluate(target, draft, prompts(target), settings, PlainRuns()) for _ in range(2))
    assert first == second


def test_a_trees_first_tokens_are_several_and_not_held_against_the_likeliest_one():
    """FAULTS 59 is of chains: a tree accepts its second candidate too, which is no contradiction."""
    target = tiny_target()
    draft = LMDrafter(DraftLM.from_target_blocks(target, [0, 3]))
    settings = SETTINGS.model_copy(update={"tree": (-1, 0, 0, 1, 3), "temperatures": (0.0,), "timed_prompts": 0})
    for entry in evaluate(target, draft, prompts(target), settings, PlainRuns()):
        assert (entry["tree"], entry["identical"]) == ("parents-4", [4, 4])
        assert "depth_one" not in entry


def test_prompts_in_other_batches_and_another_order_give_the_same_acceptance():
    """FAULTS 63, at T = 0 and T = 1; the intervals' bootstrap goes by the order, what was measured does not."""
    target = tiny_target()
    draft = LMDrafter(DraftLM.from_target_blocks(target, [0, 3]))
    asked = {domain: [*texts, Question((), ("the fox", "a dog"))] for domain, texts in prompts(target).items()}
    order = [3, 0, 4, 2, 1]

    def measured(batch, asked):
        settings = SETTINGS.model_copy(update={"timed_prompts": 0, "batch": batch})
        results = evaluate(target, draft, asked, settings, PlainRuns())
        counts = [(r["verifies"], r["tokens"], [k.get("value") for k in r["n_alpha"]]) for r in results]
        return counts, [r["alpha"]["value"] for r in results]

    shuffled = {domain: [texts[i] for i in order] for domain, texts in asked.items()}
    counts, alphas = measured(1, asked)
    for found, values in (measured(4, asked), measured(4, shuffled)):
        assert found == counts
        assert values == pytest.approx(alphas, abs=1e-5)


def test_the_oracle_is_accepted_wholly():
    target = tiny_target()
    results = evaluate(target, LMDrafter(target), prompts(target), SETTINGS, PlainRuns())
    for result in results:
        assert result["alpha"]["value"] == pytest.approx(1.0, abs=1e-4)
    whole = [result for result in results if result["tokens"] == 4 * 12]  # of others an EOS token cut the last verify
    assert len(whole) > 2
    assert {result["tokens_per_verify"]["value"] for result in whole} == {4.0}  # 12 tokens in three verifies of K + 1


def test_domains_without_rows_and_prompts_beyond_the_context_are_refused():
    with pytest.raises(UserError, match="prose"):
        held_out_prompts(rows(), EvalSettings(domains=("prose",)), 256)
    with pytest.raises(UserError, match="context of 32"):
        held_out_prompts(rows(), EvalSettings(prompt_tokens=40, max_new_tokens=8), 32)
