"""Prompts from files: every form of line, Spec-Bench's domains, conversations in full, and what is refused by name."""

import json

import pytest
from kit import tiny_model, tiny_target, tiny_tokenizer

from draftsmith.errors import UserError
from draftsmith.eval.acceptance import PlainRuns, decoding, evaluate, play, questions
from draftsmith.eval.drafters import LMDrafter, NoDraft
from draftsmith.eval.prompts import Question, Writer, read_questions, restored, stored
from draftsmith.eval.settings import EvalSettings
from draftsmith.models.draft import DraftLM
from draftsmith.models.target import Target

SETTINGS = EvalSettings(K=2, max_new_tokens=8, timed_prompts=0, temperatures=(0.0,))


def written(path, *lines):
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n", encoding="utf-8")
    return path


def read(path, target=None, room=200, **changes):
    target = tiny_target() if target is None else target
    settings = SETTINGS.model_copy(update=changes)
    return read_questions(path, settings, Writer(target, settings.template), room)


def test_a_line_is_a_text_a_chat_or_turns(tmp_path):
    target = tiny_target()
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is a fox?"}]
    path = written(
        tmp_path / "q.jsonl",
        {"prompt": "the quick brown"},
        {"messages": chat, "domain": "chat"},
        {"turns": ["hello", "and now?"], "domain": "chat"},
    )
    found, too_long = read(path, target)
    assert (list(found), too_long) == (["questions", "chat"], 0)
    assert found["questions"] == [list(target.tokenizer("the quick brown")["input_ids"])]
    one, two = found["chat"]
    text = target.tokenizer.decode(Writer(target).first(one))
    assert text.replace(" ", "") == "<|endoftext|><|system|>bebrief<|end|><|user|>whatisafox?<|end|><|assistant|>"
    assert two == Question((), ("hello", "and now?"))
    assert two.asked(["hi"])[1:] == [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "and now?"}]
    assert restored(json.loads(json.dumps(stored(found)))) == found


def test_spec_bench_has_six_domains_and_mt_bench_its_own(tmp_path):
    mt = [{"question_id": i, "category": c, "turns": ["a", "b"]} for i, c in enumerate(("writing", "coding", "math"))]
    spec = [{"category": c, "turns": ["a"]} for c in ("translation", "summarization", "qa", "math_reasoning", "rag")]
    found, _ = read(written(tmp_path / "spec.jsonl", *mt, *spec))
    assert {domain: len(asked) for domain, asked in found.items()} == {
        "multi-turn": 3, "translation": 1, "summarization": 1, "qa": 1, "math_reasoning": 1, "rag": 1,
    }  # fmt: skip
    assert set(read(written(tmp_path / "mt.jsonl", *mt))[0]) == {"writing", "coding", "math"}
    assert set(read(written(tmp_path / "mt.jsonl", *mt), domains=("math",))[0]) == {"math"}
    assert len(read(tmp_path / "spec.jsonl", prompts=2)[0]["multi-turn"]) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"category": "x"}, "line 1: has none of prompt, messages, turns"),
        ({"prompt": "a", "turns": ["b"]}, "line 1: has prompt and turns of"),
        ({"prompt": 3}, "prompt is no text"),
        ({"turns": "hello"}, "turns is no list"),
        ({"messages": [{"role": "user"}]}, "objects with role and content"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "end with the user's",
        ),
        ([1], "not an object"),
    ],
)
def test_a_wrong_line_is_refused_by_file_line_and_field(tmp_path, line, message):
    with pytest.raises(UserError, match=message) as error:
        read(written(tmp_path / "q.jsonl", line))
    assert "q.jsonl" in str(error.value)


def test_a_file_that_is_missing_empty_or_of_other_domains_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="is empty"):
        read(written(tmp_path / "empty.jsonl"))
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{')
    with pytest.raises(UserError, match=r"bad\.jsonl, line 2: not JSON"):
        read(tmp_path / "bad.jsonl")
    with pytest.raises(UserError, match="no usable prompt of code"):
        read(written(tmp_path / "q.jsonl", {"prompt": "a"}), domains=("code",))


def test_prompts_without_room_are_left_out_and_counted(tmp_path):
    path = written(tmp_path / "q.jsonl", {"prompt": "fox " * 300}, {"prompt": "fox"})
    found, too_long = read(path)
    assert (len(found["questions"]), too_long) == (1, 1)
    remarks = questions(tiny_target(), SETTINGS.model_copy(update={"questions": str(path)}))[1]
    assert remarks == ["1 prompts of more than 246 tokens were left out"]


def test_chats_need_a_template_unless_they_are_to_be_plain_text(tmp_path):
    target = Target(tiny_model(), tiny_tokenizer(template=None), "plain")
    path = written(tmp_path / "q.jsonl", {"turns": ["a fox"]})
    with pytest.raises(UserError, match=r"no chat template; .*evaluation\.template=none"):
        read(path, target)
    settings = SETTINGS.model_copy(update={"questions": str(path), "template": "none"})
    found, remarks = questions(target, settings)
    assert Writer(target, "none").first(found["questions"][0]) == list(target.tokenizer("a fox\n\n")["input_ids"])
    assert remarks == ["note: conversations are joined as plain text, without a chat template"]
    assert Writer(target, "none").template is None
    recorded = Writer(tiny_target()).template
    assert recorded is not None
    assert recorded["add_generation_prompt"]
    assert "<|assistant|>" in recorded["text"]


def test_a_second_turn_is_asked_after_the_answer_that_was_decoded():
    target = tiny_target()
    question, writer = Question((), ("the fox", "and the dog")), Writer(target)
    [[first, second]] = play(target, NoDraft(), [question], SETTINGS, decoding(SETTINGS, 0.0), writer)
    answer = target.tokenizer.decode(first.tokens, skip_special_tokens=True)
    assert first.prompt == writer.ids([{"role": "user", "content": "the fox"}])
    assert second.prompt == writer.ids(
        [
            {"role": "user", "content": "the fox"},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "and the dog"},
        ]
    )
    [[alone]] = play(target, NoDraft(), [Question((), ("the fox",))], SETTINGS, decoding(SETTINGS, 0.0), writer)
    assert alone.tokens == first.tokens
    narrow = SETTINGS.model_copy(update={"max_new_tokens": target.context - len(first.prompt) - SETTINGS.K})
    [ended] = play(target, NoDraft(), [question], narrow, decoding(narrow, 0.0), writer)
    assert len(ended) == 1, "no room for a second"


def test_a_conversation_is_one_prompt_with_an_answer_for_each_turn():
    target = tiny_target()
    asked = [Question((), ("the fox", "and the dog")), [9, 10, 11]]
    draft = LMDrafter(DraftLM.from_target_blocks(target, [0, 3]))
    [entry] = evaluate(target, draft, {"chat": asked}, SETTINGS, PlainRuns())
    assert (entry["prompts"], entry["answers"], entry["identical"]) == (2, 3, [3, 3])
    assert len(entry["per_prompt"]["verifies"]) == 2
    assert entry["depth_one"]["positions"] == entry["n_alpha"][0]["count"]
