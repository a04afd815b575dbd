"""The sample text of a result: its pieces are the text, its depths those of the trace."""

from kit import tiny_target, tiny_tokenizer

from draftsmith.eval.acceptance import PlainRuns, evaluate
from draftsmith.eval.decode import Decoded, Verify
from draftsmith.eval.drafters import LMDrafter
from draftsmith.eval.sample import depths, sample
from draftsmith.eval.settings import EvalSettings


def verify(accepted: int, emitted: int) -> Verify:
    return Verify(3, accepted, emitted, (), ())


def test_a_token_has_the_place_at_which_it_was_drafted_and_the_targets_own_has_none():
    """Two accepted and the residual; none accepted; three accepted and cut before the bonus token."""
    decoded = Decoded([1], list(range(7)), trace=[verify(2, 3), verify(0, 1), verify(3, 3)])
    assert depths(decoded) == [1, 2, 0, 0, 1, 2, 3]


def test_the_pieces_are_the_text_and_a_character_shows_with_its_last_token():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("the quick box", add_special_tokens=False)["input_ids"]
    decoded = Decoded(ids[:3], ids, trace=[verify(1, 2)] * (len(ids) // 2) + [verify(0, 1)] * (len(ids) % 2))
    shown = sample(decoded, tokenizer)
    assert "".join(text for text, _ in shown["pieces"]) == "the quick box"
    assert shown["prompt"] == tokenizer.decode(ids[:3])
    assert {depth for _, depth in shown["pieces"]} == {0, 1}


def test_every_temperature_and_way_of_drafting_is_measured_by_itself_with_a_sample():
    target = tiny_target()
    settings = EvalSettings(
        drafting="both", temperatures=(0, 1.5), K=2, prompts=2, prompt_tokens=4, max_new_tokens=6, timed_prompts=0
    )
    results = evaluate(target, LMDrafter(target), {"code": [[6, 7, 8], [9, 10]]}, settings, PlainRuns())
    how = [(r["temperature"], r["drafting"]) for r in results]
    assert how == [(0, "greedy"), (1.5, "sampled"), (1.5, "greedy")]
    assert results[1]["alpha"]["value"] > 0.999, "the target drafts for itself"
    assert results[2]["alpha"]["value"] < 0.9, "its likeliest token alone, at a temperature that flattens"
    assert all({depth for _, depth in r["sample"]["pieces"]} <= {0, 1, 2} for r in results)
