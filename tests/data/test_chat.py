"""Supervised spans come from the template; malformed conversations are dropped with a reason (FAULTS 2-5, 10)."""

from typing import Any

import numpy as np
import pytest
from kit import CHAT_TEMPLATE, tiny_model, tiny_tokenizer
from transformers import BatchEncoding

from draftsmith.data.chat import Rendered, UnusableError, cut, render, template_ids
from draftsmith.errors import UserError
from draftsmith.eval.decode import prompt_ids
from draftsmith.models.target import Target

USER, ANSWER = {"role": "user", "content": "what is it?"}, {"role": "assistant", "content": "the sum"}
AGAIN, LATER = {"role": "user", "content": "and now?"}, {"role": "assistant", "content": "a fox"}
UNMARKED = CHAT_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
CHATML_LIKE = (  # a line break after the end of turn, which no server ever generates
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
UNUSUAL = (
    "{% for message in messages %}{% if message['role'] == 'user' %}[[Q ]]{{ message['content'] }}\n"
    "{% else %}((A)) {{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}((A)) {% endif %}"
)
REWRITING = (  # earlier answers are shortened in the history, as reasoning models do
    "{% for message in messages %}{% if message['role'] == 'user' %}<|user|>{{ message['content'] }}<|end|>"
    "{% else %}<|assistant|>{{ message['content'] if loop.last else message['content'][:3] }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

MARKED_REWRITING = REWRITING.replace(
    "{{ message['content'] if loop.last else message['content'][:3] }}<|end|>",
    "{% generation %}{{ message['content'] if loop.last else message['content'][:3] }}<|end|>{% endgeneration %}",
)


def only(messages: list[Any], tokenizer: Any) -> Rendered:
    (row,) = render(messages, tokenizer)
    return row


def spans(tokenizer: Any, messages: list[dict[str, str]]) -> list[str]:
    """The text of each run of supervised tokens."""
    row = only(messages, tokenizer)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row.supervised.astype(int), [0]])))
    return [tokenizer.decode(row.token_ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, UNMARKED, CHATML_LIKE])
def test_answer_and_end_of_turn_are_supervised_and_nothing_of_the_next_header(template: str) -> None:
    assert spans(tiny_tokenizer(template), [USER, ANSWER, AGAIN, LATER]) == ["the sum<|end|>", "a fox<|end|>"]


def test_unusual_role_markers_need_no_knowledge_of_them() -> None:
    tokenizer = tiny_tokenizer(UNUSUAL)
    found = [tokenizer.decode(row.token_ids[row.supervised]) for row in render([USER, ANSWER, AGAIN, LATER], tokenizer)]
    assert "".join(found) == "the sum<|endoftext|>a fox<|endoftext|>"


def test_marked_and_unmarked_template_give_the_same_row() -> None:
    marked, unmarked = (only([USER, ANSWER], tiny_tokenizer(t)) for t in (CHAT_TEMPLATE, UNMARKED))
    assert marked.token_ids.tolist() == unmarked.token_ids.tolist()
    assert marked.supervised.tolist() == unmarked.supervised.tolist()


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, UNMARKED, CHATML_LIKE, UNUSUAL, REWRITING, MARKED_REWRITING])
def test_every_answer_follows_the_ids_that_a_server_reads_before_it(template: str) -> None:
    tokenizer = tiny_tokenizer(template)
    target = Target(tiny_model(), tokenizer)
    prompts = [prompt_ids(target, chat) for chat in ([USER], [USER, ANSWER, AGAIN])]
    starts = []
    for row in render([USER, ANSWER, AGAIN, LATER], tokenizer):
        for start in np.flatnonzero(np.diff(row.supervised.astype(int)) == 1) + 1:
            starts.append(row.token_ids[:start].tolist())
    assert starts == prompts


@pytest.mark.parametrize("template", [REWRITING, MARKED_REWRITING])
def test_template_that_rewrites_history_gives_each_answer_a_row_of_its_own(template: str) -> None:
    tokenizer = tiny_tokenizer(template)
    rows = render([USER, ANSWER, AGAIN, LATER], tokenizer)
    assert [tokenizer.decode(row.token_ids[row.supervised]) for row in rows] == ["the sum<|end|>", "a fox<|end|>"]


def test_answer_that_does_not_continue_the_generation_prompt_is_never_trained() -> None:
    opening = CHATML_LIKE.replace("<|assistant|>\n{% endif %}", "<|assistant|>\n<think>{% endif %}")
    with pytest.raises(UnusableError, match="does not continue its generation prompt"):
        render([USER, ANSWER], tiny_tokenizer(opening))


@pytest.mark.parametrize("options", [{}, {"pad_token": None}, {"pad_token": "<|endoftext|>"}, {"eos_token": "<|end|>"}])
def test_pad_token_decides_nothing_and_end_of_turn_stays_supervised(options: dict[str, Any]) -> None:
    assert spans(tiny_tokenizer(**options), [USER, ANSWER]) == ["the sum<|end|>"]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([ANSWER, USER, LATER], "assistant speaks first"),
        ([{"role": "system", "content": "be brief"}], "no answer"),
        ([USER], "no answer"),
        ([USER, {"role": "assistant", "content": ""}], "blank answer"),
        ([USER, {"role": "assistant", "content": " \n"}], "blank answer"),
        ([{"role": "user", "content": None}, ANSWER], "null content"),
        ([USER, AGAIN, ANSWER], "two turns of one role in a row"),
        ([], "no messages"),
        ([USER, {"role": "assistant", "content": None}], "null content"),
        ([USER, {"role": "assistant", "content": None, "tool_calls": []}], "null content"),
        (
            [USER, {"role": "assistant", "content": None, "tool_calls": [{}]}],
            "tool call not shown by the chat template",
        ),
        ([USER, {"role": "tool", "content": "4"}, ANSWER], "tool result without a call"),
    ],
)
def test_malformed_conversation_is_unusable_for_a_stated_reason(messages: list[Any], reason: str) -> None:
    with pytest.raises(UnusableError, match=f"^{reason}$"):
        render(messages, tiny_tokenizer())


def test_last_turn_from_the_user_is_left_out_and_the_answers_before_it_stay() -> None:
    row, trimmed = (only(chat, tiny_tokenizer()) for chat in ([USER, ANSWER, AGAIN], [USER, ANSWER]))
    assert row.token_ids.tolist() == trimmed.token_ids.tolist()


def test_system_message_may_precede_the_user() -> None:
    assert spans(tiny_tokenizer(), [{"role": "system", "content": "be brief"}, USER, ANSWER]) == ["the sum<|end|>"]


def test_template_that_refuses_a_row_is_a_reason_not_a_crash() -> None:
    template = "{{ raise_exception('system role not supported') }}"
    with pytest.raises(UnusableError, match="refused by the chat template"):
        render([USER, ANSWER], tiny_tokenizer(template))


@pytest.mark.parametrize(
    "fault",
    ["1 / 0", "messages[0].content.index('nowhere')", "'%(a)s' % {}", "range(10 ** 6) | list"],
)
def test_a_template_that_fails_in_any_way_is_a_reason_not_a_crash(fault: str) -> None:
    with pytest.raises(UnusableError, match="refused by the chat template"):
        render([USER, ANSWER], tiny_tokenizer("{{ " + fault + " }}"))


def test_a_template_that_marks_nothing_of_an_answer_leaves_a_row_that_is_dropped() -> None:
    template = (
        "{% for message in messages %}{% if message['role'] == 'user' %}<|user|>{{ message['content'] }}"
        "{% else %}{% generation %}{% endgeneration %}{% endif %}{% endfor %}"
    )
    row = only([USER, ANSWER], tiny_tokenizer(template))
    assert not row.supervised.any()


@pytest.mark.parametrize("spelt", ["<|end|>", "<|endoftext|>"])
@pytest.mark.parametrize("template", [CHAT_TEMPLATE, UNMARKED, CHATML_LIKE])
def test_an_answer_that_spells_out_its_end_of_turn_is_dropped_and_a_question_that_does_is_not(
    template: str, spelt: str
) -> None:
    tokenizer = tiny_tokenizer(template)
    with pytest.raises(UnusableError, match="end of turn spelt out in an answer"):
        render([USER, {"role": "assistant", "content": f"the sum{spelt} and more"}], tokenizer)
    assert only([{"role": "user", "content": f"what is {spelt}?"}, ANSWER], tokenizer).supervised.sum() > 1


def test_prompt_longer_than_max_length_is_dropped_and_a_longer_answer_is_cut() -> None:
    tokenizer = tiny_tokenizer()
    prompt = len(prompt_ids(Target(tiny_model(), tokenizer), [USER]))
    with pytest.raises(UnusableError, match="prompt longer than max_length"):
        cut(only([USER, ANSWER], tokenizer), prompt)
    row = cut(only([USER, ANSWER], tokenizer), prompt + 1)
    assert row.supervised.tolist() == [False] * prompt + [True]


def test_tokenizer_without_template_is_one_clear_error() -> None:
    with pytest.raises(UserError, match="has no chat template"):
        render([USER, ANSWER], tiny_tokenizer(None))


WRAPPINGS = [
    lambda ids: ids,
    lambda ids: [ids],
    lambda ids: {"input_ids": ids},
    lambda ids: BatchEncoding({"input_ids": [ids]}),
    np.asarray,
]


@pytest.mark.parametrize("wrap", WRAPPINGS)
def test_whatever_a_template_call_returns_the_ids_are_the_same(wrap: Any) -> None:
    assert template_ids(wrap([3, 1, 2])) == [3, 1, 2]
