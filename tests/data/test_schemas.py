"""Every known schema of one chat gives the same messages, and a row that has none says what is wrong (FAULTS 3, 10)."""

from typing import Any

import pytest

from draftsmith.data.schemas import Content, RowError, read_row

ASKED, SAID = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CHAT = Content(messages=[ASKED, SAID])
BRIEF = {"role": "system", "content": "be brief"}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, SAID]},
        {"messages": [ASKED | {"tool_calls": None}, SAID], "tools": None},
        {"messages": [ASKED, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}]},
        {"messages": None, "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"conversations": [{"from": "user", "value": "q"}, {"from": "assistant", "value": "a"}], "system": " "},
        {"conversations": [ASKED, SAID]},
        {"prompt": "q", "completion": "a"},
        {"prompt": [ASKED], "completion": [SAID]},
        {"prompt": [ASKED], "completion": "a"},
    ],
)
def test_all_schemas_of_one_chat_are_equal(row: dict[str, Any]) -> None:
    assert read_row(row) == CHAT


def test_a_system_text_beside_the_turns_is_their_first_message_once() -> None:
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    expected = Content(messages=[BRIEF, ASKED, SAID])
    assert read_row({"system": "be brief", "conversations": turns}) == expected
    system = {"from": "system", "value": "be brief"}
    assert read_row({"system": "another", "conversations": [system, *turns]}) == expected


def test_tool_calls_reasoning_and_tools_stay_whole() -> None:
    call = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [{"function": {"name": "f"}}],
    }
    tools = [{"type": "function", "function": {"name": "f"}}]
    expected = Content(messages=[ASKED, call], tools=tools)
    assert read_row({"messages": [ASKED, call], "tools": tools}) == expected
    assert (
        read_row({"messages": [ASKED, call], "tools": '[{"type": "function", "function": {"name": "f"}}]'}) == expected
    )


def test_no_messages_is_a_conversation_that_says_nothing_and_not_an_unknown_schema() -> None:
    assert read_row({"messages": []}) == read_row({"messages": None}) == Content(messages=[])


@pytest.mark.parametrize("key", ["input_ids", "token_ids"])
@pytest.mark.parametrize(
    ("mask", "supervised"),
    [
        ({}, [True, True, True]),
        ({"loss_mask": [0, 1, 1]}, [False, True, True]),
        ({"supervised": [False, True, False]}, [False, True, False]),
        ({"labels": [-100, 6, -100]}, [False, True, False]),
    ],
)
def test_token_ids_take_their_mask_from_a_mask_or_from_labels(key: str, mask: Any, supervised: list[bool]) -> None:
    assert read_row({key: [5, 6, 7], **mask}) == Content(token_ids=[5, 6, 7], supervised=supervised)


def test_padding_named_by_an_attention_mask_is_left_out() -> None:
    row = {"input_ids": [0, 0, 5, 6, 0], "attention_mask": [0, 0, 1, 1, 0], "labels": [-100, -100, -100, 6, -100]}
    assert read_row(row) == Content(token_ids=[5, 6], supervised=[False, True])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "q"}, "unknown schema"),
        ({"prompt": "q"}, "unknown schema"),
        ({"text": float("nan")}, "unknown schema"),
        (None, "not an object"),
        ({"messages": "hello"}, "malformed messages"),
        ({"messages": [{"speaker": "me"}]}, "malformed messages"),
        ({"messages": [{"role": 5, "content": "q"}]}, "malformed messages"),
        ({"conversations": [{"from": ["human"], "value": "q"}]}, "malformed messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content is not text"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content is not text"),
        ({"messages": [ASKED, SAID], "tools": "{"}, "malformed tools"),
        ({"messages": [ASKED, SAID], "tools": 5}, "malformed tools"),
        ({"messages": [ASKED, SAID], "tools": [1]}, "malformed tools"),
        ({"messages": [ASKED, SAID], "tools": ["{}"]}, "malformed tools"),
        ({"messages": [ASKED, {**SAID, "tool_calls": "f()"}]}, "malformed tool calls"),
        ({"messages": [ASKED, {**SAID, "tool_calls": {"name": "f"}}]}, "malformed tool calls"),
        ({"messages": [ASKED, {**SAID, "tool_calls": [None]}]}, "malformed tool calls"),
        ({"messages": [ASKED, {**SAID, "tool_calls": 1}]}, "malformed tool calls"),
        ({"input_ids": [1, -1]}, "malformed token ids"),
        ({"input_ids": [1, True]}, "malformed token ids"),
        ({"input_ids": [1, 2**40]}, "malformed token ids"),
        ({"input_ids": "12"}, "malformed token ids"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "malformed mask"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0.5]}, "malformed mask"),
        ({"input_ids": [1, 2], "labels": [2]}, "malformed mask"),
        ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "labels are other tokens"),
    ],
)
def test_a_row_of_no_schema_has_a_reason_and_one_short_line(row: Any, reason: str) -> None:
    with pytest.raises(RowError) as caught:
        read_row(row)
    assert caught.value.reason == reason
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 300
