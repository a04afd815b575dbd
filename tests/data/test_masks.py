"""Masks of well-known kinds of template, and the data options that choose them (FAULTS 2, 4, 5, 8)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from kit import CHAT_TEMPLATE, tiny_tokenizer
from templates import CHATML, CHATML_OPENING, FAMILIES, HEADERS, HIDING, INSTRUCT, MODEL, family_tokenizer

from draftsmith.data.chat import Rendered, UnusableError, generation_prompt, render
from draftsmith.data.corpus import DataSettings, Source
from draftsmith.data.prepare import prepare
from draftsmith.data.rows import Rows
from draftsmith.errors import UserError

USER, ANSWER = {"role": "user", "content": "what is it?"}, {"role": "assistant", "content": "the sum"}
AGAIN, LATER = {"role": "user", "content": "and now?"}, {"role": "assistant", "content": "a fox"}
CHAT = [USER, ANSWER, AGAIN, LATER]
THOUGHT = {"role": "assistant", "content": "the sum", "reasoning_content": "let me add"}
INLINE = {"role": "assistant", "content": "<think>\nlet me add\n</think>\n\nthe sum"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLING = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    LATER,
]


def answers(rows: list[Rendered]) -> Iterator[tuple[list[int], list[int]]]:
    """(ids before it, its ids) of every run of supervised tokens."""
    for ids, supervised, _ in rows:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], supervised.astype(int), [0]])))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            yield ids[:start].tolist(), ids[start:end].tolist()


def said(tokenizer: Any, rows: list[Rendered]) -> list[str]:
    return [tokenizer.decode(ids) for _, ids in answers(rows)]


def prompts(tokenizer: Any, messages: list[Any], tools: Any = None) -> list[list[int]]:
    """What a server reads before each answer, by `transformers` alone."""
    ends = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    options = {"tools": tools, "add_generation_prompt": True, "return_dict": True}
    return [list(tokenizer.apply_chat_template(messages[:end], **options)["input_ids"]) for end in ends]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["<think>\n\n</think>\n\nthe sum<|im_end|>", "<think>\n\n</think>\n\na fox<|im_end|>"]),
        (CHATML_OPENING, ["\n</think>\n\nthe sum<|im_end|>", "\n</think>\n\na fox<|im_end|>"]),
        (HEADERS, ["the sum<|eot_id|>", "a fox<|eot_id|>"]),
        (INSTRUCT, [" the sum<|endoftext|>", " a fox<|endoftext|>"]),
        (MODEL, ["the sum<end_of_turn>", "a fox<end_of_turn>"]),
    ],
)
def test_answers_of_every_family_end_with_their_turn_and_follow_what_a_server_reads(
    template: str, expected: list[str]
) -> None:
    tokenizer = family_tokenizer(template)
    rows = render(CHAT, tokenizer)
    assert said(tokenizer, rows) == expected
    assert [before for before, _ in answers(rows)] == prompts(tokenizer, CHAT)
    assert generation_prompt(CHAT[:3], tokenizer) == prompts(tokenizer, CHAT)[1]


def test_reasoning_of_earlier_turns_is_gone_from_later_contexts_and_trained_in_its_own() -> None:
    tokenizer = family_tokenizer(CHATML)
    first, second = render([USER, THOUGHT, AGAIN, LATER], tokenizer)
    assert "let me add" in tokenizer.decode(first.token_ids[first.supervised])
    assert "let me add" not in tokenizer.decode(second.token_ids)


@pytest.mark.parametrize(("template", "gap"), [(CHATML_OPENING, "\n\n"), (HIDING, "\n\n")])
def test_reasoning_behind_a_prompt_that_opens_a_think_block_is_trained_once_opened(template: str, gap: str) -> None:
    tokenizer = family_tokenizer(template)
    (answer,) = said(tokenizer, render([USER, INLINE], tokenizer))
    assert answer.startswith(f"let me add\n</think>{gap}the sum<|")


def test_answer_that_a_reasoning_model_cannot_have_given_is_refused() -> None:
    with pytest.raises(UnusableError, match="does not continue its generation prompt"):
        render([USER, ANSWER], family_tokenizer(HIDING))


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
@pytest.mark.parametrize("template", [CHATML, HEADERS])
def test_tool_call_without_content_is_supervised_and_its_result_is_not(template: str, arguments: Any) -> None:
    tokenizer = family_tokenizer(template)
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    chat = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, *CALLING[2:]]
    rows = render(chat, tokenizer, TOOLS)
    first, second = said(tokenizer, rows)
    assert '{"name": "add", "arguments": {"a": 1}}' in first
    assert "a fox" in second
    assert "3" not in first + second
    assert [before for before, _ in answers(rows)] == prompts(tokenizer, CALLING, TOOLS)


def test_tools_of_a_row_reach_the_template() -> None:
    tokenizer = family_tokenizer(CHATML)
    (bare,), (row,) = render([USER, ANSWER], tokenizer), render([USER, ANSWER], tokenizer, TOOLS)
    assert "Tools:" in tokenizer.decode(row.token_ids)
    assert "Tools:" not in tokenizer.decode(bare.token_ids)


def test_template_of_its_own_for_tools_is_used_where_there_are_tools() -> None:
    tokenizer = family_tokenizer(MODEL)
    tokenizer.chat_template = {"default": MODEL, "tool_use": CHATML}
    plain, tooled = (render([USER, ANSWER], tokenizer, tools)[0] for tools in (None, TOOLS))
    assert "<start_of_turn>" in tokenizer.decode(plain.token_ids)
    assert "<|im_start|>" in tokenizer.decode(tooled.token_ids)


def test_template_that_shows_no_tool_call_is_a_reason() -> None:
    with pytest.raises(UnusableError, match=r"^tool call not shown by the chat template$"):
        render(CALLING, family_tokenizer("{{ 'x' }}" + MODEL.replace("message.content | trim", "message.content")))


@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions_are_context_and_a_template_that_refuses_them_says_why(role: str) -> None:
    told = [{"role": role, "content": "be brief"}, USER, ANSWER]
    tokenizer = family_tokenizer(HEADERS)
    assert said(tokenizer, render(told, tokenizer)) == ["the sum<|eot_id|>"]
    with pytest.raises(UnusableError, match="refused by the chat template: roles must alternate"):
        render(told, family_tokenizer(INSTRUCT))


def test_template_that_fails_on_a_message_is_a_reason_not_a_crash() -> None:
    adding = "{% for message in messages %}{{ 1 + message.content }}{% endfor %}"
    with pytest.raises(UnusableError, match="refused by the chat template"):
        render([USER, ANSWER], family_tokenizer(adding))


MARK, DONE = "{% generation %}", "{% endgeneration %}"


@pytest.mark.parametrize(
    ("answer", "how"),
    [
        (f"<|assistant|>{MARK}{{{{ message.content }}}}<|end|>{DONE}\n", "marks"),
        (f"<|assistant|>{MARK}{{{{ message.content }}}}{DONE}<|end|>\n", "marks"),  # the end of turn left out
        (f"<|assistant|>{MARK}{{{{ message.content }}}}<|end|>\n{DONE}", "marks"),  # the next header's line break
        (f"{MARK}<|assistant|>{{{{ message.content }}}}<|end|>{DONE}\n", "marks"),  # the header
        (f"<|assistant|>{{{{ message.content[:2] }}}}{MARK}{{{{ message.content[2:] }}}}<|end|>{DONE}\n", "difference"),
        (f"<|assistant|>{{{{ message.content }}}}<|end|>\n{{% if false %}}{MARK}x{DONE}{{% endif %}}", "difference"),
    ],
)
def test_marks_in_the_wrong_place_train_neither_more_nor_less_than_what_is_generated(answer: str, how: str) -> None:
    template = (
        "{% for message in messages %}{% if message.role == 'user' %}<|user|>{{ message.content }}<|end|>\n"
        f"{{% else %}}{answer}{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}<|assistant|>{{% endif %}}"
    )
    tokenizer = tiny_tokenizer(template)
    rows = render(CHAT, tokenizer)
    assert said(tokenizer, rows) == ["the sum<|end|>", "a fox<|end|>"]
    assert [before for before, _ in answers(rows)] == prompts(tokenizer, CHAT)
    assert {row.how for row in rows} == {how}


def test_what_a_template_leaves_out_inside_an_answer_stays_out() -> None:
    inner = f"{MARK}{{{{ message.content[:4] }}}}{DONE}{{{{ message.content[4:] }}}}{MARK}<|end|>{DONE}"
    tokenizer = tiny_tokenizer(CHAT_TEMPLATE.replace(f"{MARK}{{{{ message['content'] }}}}<|end|>{DONE}", inner))
    assert said(tokenizer, render([USER, ANSWER], tokenizer)) == ["the ", "<|end|>"]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, *FAMILIES.values()])
def test_last_turn_alone_is_trained_in_the_context_of_all(template: str) -> None:
    tokenizer = family_tokenizer(template)
    rows = render(CHAT, tokenizer, turns="last")
    ((before, ids),) = answers(rows)
    assert before == prompts(tokenizer, CHAT)[-1]
    assert ids == list(answers(render(CHAT, tokenizer)))[-1][1]


def test_training_on_text_supervises_every_token_but_the_first() -> None:
    (row,) = render(CHAT, tiny_tokenizer(), train_on="text")
    (same,) = render(CHAT, tiny_tokenizer())
    assert row.token_ids.tolist() == same.token_ids.tolist()
    assert row.supervised.tolist() == [False] + [True] * (len(row.token_ids) - 1)


@pytest.mark.parametrize("answer", [THOUGHT, INLINE, {**ANSWER, "thinking": "let me add"}])
def test_dropped_reasoning_leaves_the_ids_of_an_answer_without_it(answer: dict[str, str]) -> None:
    tokenizer = family_tokenizer(CHATML)
    (row,), (bare,) = (render([USER, a], tokenizer, reasoning="drop") for a in (answer, ANSWER))
    assert row.token_ids.tolist() == bare.token_ids.tolist()
    assert row.supervised.tolist() == bare.supervised.tolist()
    assert render([USER, answer], tokenizer)[0].token_ids.tolist() != bare.token_ids.tolist()


def test_answer_that_is_reasoning_alone_is_blank_without_it() -> None:
    only_thought = {"role": "assistant", "content": "<think>hm</think>"}
    with pytest.raises(UnusableError, match="blank answer"):
        render([USER, only_thought], family_tokenizer(CHATML), reasoning="drop")


def sharegpt(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    names = {"user": "human", "assistant": "gpt"}
    return [{"from": names[message["role"]], "value": message["content"]} for message in messages]


SCHEMAS = {
    "messages": lambda chat: {"messages": chat},
    "conversations": lambda chat: {"conversations": sharegpt(chat)},
    "prompt": lambda chat: {"prompt": chat[:-1], "completion": chat[-1:]},
}
PATHS = ("json", "parquet", "hub", "streaming")


def source(folder: Path, schema: str, path: str) -> Source:
    """Twelve conversations of a schema, as one kind of source."""
    rows = [SCHEMAS[schema]([{**USER, "content": f"what is {n}?"}, INLINE, AGAIN, LATER]) for n in range(12)]
    if path == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
        return Source(kind="parquet", path=str(folder / "rows.parquet"))
    (folder / "source").mkdir()
    (folder / "source" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if path == "json":
        return Source(kind="json", path=str(folder / "source" / "train.jsonl"))
    return Source(kind="hub", path=str(folder / "source"), streaming=path == "streaming")


def prepared(
    folder: Path, schema: str = "messages", path: str = "json", **options: Any
) -> tuple[list[list[int]], list[list[bool]], dict[str, Any]]:
    """(ids, masks, summary) of the training rows of a source, prepared with these options."""
    folder.mkdir()
    settings = DataSettings(sources=(source(folder, schema, path),), max_length=200, held_out=0.2, **options)
    summary = prepare(settings, family_tokenizer(HEADERS), folder / "rows")
    rows = sorted(Rows.open(folder / "rows", "train"), key=lambda row: row.token_ids.tolist())
    return [row.token_ids.tolist() for row in rows], [row.supervised.tolist() for row in rows], summary


@pytest.mark.parametrize(("schema", "path"), [*((s, "json") for s in SCHEMAS), *(("messages", p) for p in PATHS[1:])])
def test_each_option_acts_on_the_rows_of_every_kind_of_source(
    schema: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    ids, masks, summary = prepared(tmp_path / "all", schema, path)
    assert summary["train"]["masks"] == {"difference": summary["train"]["rows"]}
    last_ids, last, _ = prepared(tmp_path / "last", schema, path, turns="last")
    assert last_ids == ids
    assert all(0 < sum(a) < sum(b) for a, b in zip(last, masks, strict=True))
    text_ids, text, _ = prepared(tmp_path / "text", schema, path, train_on="text")
    assert text_ids == ids
    assert all(mask == [False] + [True] * (len(mask) - 1) for mask in text)
    short, _, _ = prepared(tmp_path / "drop", schema, path, reasoning="drop")
    assert all(len(a) < len(b) for a, b in zip(short, ids, strict=True))


def test_options_act_on_rows_that_come_with_their_masks_or_are_refused(tmp_path: Path) -> None:
    rows = [{"token_ids": [n + 6, 7, 8, 9, 10], "loss_mask": [0, 1, 0, 1, 1]} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    from_file = (Source(kind="json", path=str(tmp_path / "rows.jsonl")),)

    def masks(**options: Any) -> set[tuple[bool, ...]]:
        prepare(DataSettings(sources=from_file, held_out=0.2, **options), tiny_tokenizer(), tmp_path / "rows")
        return {tuple(row.supervised.tolist()) for row in Rows.open(tmp_path / "rows", "train")}

    assert masks() == {(False, True, False, True, True)}
    assert masks(turns="last") == {(False, False, False, True, True)}
    assert masks(train_on="text") == {(False, True, True, True, True)}
    with pytest.raises(UserError, match=r"data\.reasoning: drop cannot find the reasoning"):
        masks(reasoning="drop")


def test_rows_of_one_group_fall_on_one_side_of_the_split(tmp_path: Path) -> None:
    rows = [
        {"token_ids": [6, 7, n + 8], "loss_mask": [0, 1, 1], "draftsmith_group": f"chat {n // 3}"} for n in range(30)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = DataSettings(sources=(Source(kind="json", path=str(tmp_path / "rows.jsonl")),), held_out=0.5)
    prepare(settings, tiny_tokenizer(), tmp_path / "rows")
    groups = [
        {(int(row.token_ids[-1]) - 8) // 3 for row in Rows.open(tmp_path / "rows", split)}
        for split in ("train", "held_out")
    ]
    assert groups[0] | groups[1] == set(range(10))
    assert not groups[0] & groups[1]


def test_sharegpt_and_messages_of_one_chat_give_identical_rows(tmp_path: Path) -> None:
    assert prepared(tmp_path / "a", "messages")[:2] == prepared(tmp_path / "b", "conversations")[:2]
