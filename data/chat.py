"""Messages -> token ids and the tokens that an assistant produced, as the tokenizer's own template marks them.

Knows templates. Does not know files or how rows are stored. No header string is searched for: an answer is what the
rendering with it adds to the generation prompt before it, so that the ids before it are those that a server reads; inside
it the template's {% generation %} blocks decide where it has any.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal, NamedTuple

import numpy as np
from jinja2.exceptions import TemplateError

from draftsmith.errors import UserError

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None
GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\b")
INSTRUCTIONS = ("system", "developer")  # roles that may stand anywhere and take no turn
# A template is a program that meets data which its author did not foresee: a `+` with a missing content, an `index` of text that is
# not there, a division, a key, a range beyond the sandbox's.
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError)
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
THINK_BLOCK = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)  # reasoning written into the content of an answer


class Rendered(NamedTuple):
    """token_ids: int32 [T]; supervised: bool [T], true where the token is part of an answer or its end of turn.

    how: where the mask comes from: the template's "marks", the "difference" of renderings, all of the "text", or "given".
    """

    token_ids: np.ndarray
    supervised: np.ndarray
    how: str = "text"


class UnusableError(ValueError):
    """A row that nothing can be learnt from. The message is the reason, under which rows are counted."""


def render(
    messages: Messages,
    tokenizer: Any,
    tools: Tools = None,
    *,
    turns: Literal["all", "last"] = "all",
    train_on: Literal["answers", "text"] = "answers",
    reasoning: Literal["keep", "drop"] = "keep",
) -> list[Rendered]:
    """Token ids of a conversation and the mask of its supervised tokens (role: predicted token).

    Messages after the last answer are left out. One row, unless the template rewrites earlier turns: then each answer
    gets a row with the context that a server would give it. `tools` (JSON schemas) go to the template. The options are
    those of `DataSettings`. Raises `UnusableError` with a reason, and `UserError` without a template.
    """
    if reasoning == "drop":
        messages = [without_reasoning(message) for message in messages]
    messages = [_parsed(message) for message in usable(messages)]
    chat = _Chat(tokenizer, tools)
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    contexts = _contexts(messages, answers[-1:] if turns == "last" else answers, chat)
    if not contexts:
        raise UnusableError("the template's answer does not continue its generation prompt")
    if train_on == "text":
        return [everything(context.ids) for context in contexts]
    return [_masked(context, messages, chat) for context in contexts]


def generation_prompt(messages: Messages, tokenizer: Any, tools: Tools = None) -> list[int]:
    """The ids that a server gives to the model before it answers. Raises as `render` does."""
    chat = _Chat(tokenizer, tools)
    return chat.encode([chat.text([_parsed(message) for message in messages], generation_prompt=True)])[0]


def everything(ids: Sequence[int] | np.ndarray) -> Rendered:
    """All tokens but the first, which nothing predicts, supervised."""
    supervised = np.ones(len(ids), dtype=bool)
    supervised[:1] = False
    return Rendered(np.asarray(ids, dtype=np.int32), supervised)


def given(
    ids: Sequence[int] | np.ndarray,
    supervised: Sequence[bool] | np.ndarray,
    turns: Literal["all", "last"],
    train_on: Literal["answers", "text"],
) -> Rendered:
    """A row that came with its mask, as the options of `DataSettings` say: a turn is a run of supervised tokens."""
    if train_on == "text":
        return everything(ids)
    mask = np.array(supervised, dtype=bool)
    if turns == "last" and mask.any():
        end = int(np.flatnonzero(mask)[-1]) + 1
        earlier = np.flatnonzero(~mask[:end])
        mask[: int(earlier[-1]) + 1 if len(earlier) else 0] = False
    return Rendered(np.asarray(ids, dtype=np.int32), mask, "given")


def cut(row: Rendered, max_length: int) -> Rendered:
    """The first `max_length` tokens. Raises `UnusableError` with the reason when none of them is supervised."""
    supervised = row.supervised[:max_length].copy()
    supervised[:1] = False  # nothing predicts the first token
    if not supervised.any():
        raise UnusableError(
            "prompt longer than max_length" if len(row.token_ids) > max_length else "nothing supervised"
        )
    return Rendered(row.token_ids[:max_length], supervised, row.how)


def usable(messages: Messages) -> Messages:
    """The messages up to the last answer. Raises `UnusableError` with the reason when the conversation is malformed."""
    if not messages:
        raise UnusableError("no messages")
    if any(message.get("content") is None and not _calls(message) for message in messages):
        raise UnusableError("null content")
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise UnusableError("no answer")
    kept = messages[: answers[-1] + 1]
    if any(_blank(message) for message in kept if message["role"] == "assistant"):
        raise UnusableError("blank answer")
    check_order(kept)
    return kept


def check_order(messages: Messages) -> None:
    """Raise `UnusableError` where speakers do not take turns: users and assistants alternate, tools answer calls."""
    before: Mapping[str, Any] = {"role": ""}
    for message in messages:
        role, last = message["role"], before["role"]
        if role in INSTRUCTIONS:
            continue
        if role == "assistant" and not last:
            raise UnusableError("assistant speaks first")
        if role == "tool" and last != "tool" and not _calls(before):
            raise UnusableError("tool result without a call")
        if role == last and role != "tool":
            raise UnusableError("two turns of one role in a row")
        before = message


def without_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """An assistant's message without its reasoning: neither as a field nor as a <think> block that opens the content."""
    kept = {key: value for key, value in message.items() if key not in REASONING_FIELDS}
    if kept["role"] == "assistant" and isinstance(kept.get("content"), str):
        block = THINK_BLOCK.match(kept["content"])
        kept["content"] = kept["content"][block.end() :] if block else kept["content"]
    return kept


def template_ids(result: Any) -> list[int]:
    """The ids in what `apply_chat_template` returned: a list, a list of one, a mapping, a `BatchEncoding`, a tensor."""
    if isinstance(result, Mapping) or hasattr(result, "input_ids"):
        result = result["input_ids"]
    if hasattr(result, "tolist"):
        result = result.tolist()
    if result and isinstance(result[0], list | tuple):
        result = result[0]
    return [int(token) for token in result]


def _calls(message: Mapping[str, Any]) -> bool:
    return message["role"] == "assistant" and bool(message.get("tool_calls"))


def _blank(message: Mapping[str, Any]) -> bool:
    return not (message.get("content") or "").strip() and not _calls(message)


def _parsed(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as servers give it to a template: the arguments of tool calls as objects, not as JSON in a string."""
    parsed = dict(message)
    if _calls(message):
        parsed["tool_calls"] = [_parsed_call(call) for call in message["tool_calls"]]
    return parsed


def _parsed_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"])
    except json.JSONDecodeError as error:
        raise UnusableError("tool call whose arguments are not JSON") from error
    return {**call, "function": {**function, "arguments": arguments}}


class _Chat:
    """A tokenizer's template with the tools of one conversation."""

    def __init__(self, tokenizer: Any, tools: Tools) -> None:
        self.tokenizer = tokenizer
        self.tools = [dict(tool) for tool in tools] if tools else None
        if not tokenizer.chat_template:
            name = tokenizer.name_or_path or type(tokenizer).__name__
            raise UserError(
                f"the tokenizer of {name} has no chat template; set its chat_template, or give text sources"
            )
        template = tokenizer.get_chat_template(None, self.tools)  # a tokenizer may have one of its own for tools
        self.marked = bool(GENERATION_BLOCK.search(template)) and tokenizer.is_fast

    def text(self, messages: Messages, generation_prompt: bool = False) -> str:
        return self._apply(messages, tokenize=False, add_generation_prompt=generation_prompt)

    def marks(self, messages: Messages) -> tuple[list[int], np.ndarray]:
        """Ids of the whole rendering and bool [T]: inside a {% generation %} block."""
        encoded = self._apply(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return template_ids(encoded), np.asarray(encoded["assistant_masks"], dtype=bool).reshape(-1)

    def encode(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        encoded = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [template_ids(ids) for ids in encoded]

    def _apply(self, messages: Messages, **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(list(messages), tools=self.tools, **options)
        except TEMPLATE_ERRORS as error:
            said = str(error).strip().splitlines() or [type(error).__name__]
            raise UnusableError(f"refused by the chat template: {said[0][:80]}") from error


@dataclass
class _Context:
    """ids of a row that a server would have seen; spans: where each answer in it begins and ends; last: its message."""

    ids: list[int]
    spans: list[tuple[int, int]] = field(default_factory=list)
    last: int = 0


def _contexts(messages: Messages, answers: Sequence[int], chat: _Chat) -> list[_Context]:
    """The ids before an answer are always those of its generation prompt; an answer whose prompt does not continue the
    row so far begins another row. An answer that no server would produce is context only."""
    prompts = [chat.text(messages[:index], generation_prompt=True) for index in answers]
    said = [_continuation(messages[: index + 1], prompt, chat) for index, prompt in zip(answers, prompts, strict=True)]
    produced = [(i, p, a) for i, p, a in zip(answers, prompts, said, strict=True) if a is not None]
    encoded = chat.encode([text for _, prompt, answer in produced for text in (prompt, prompt + answer)])
    contexts: list[_Context] = []
    for number, (index, _, text) in enumerate(produced):
        before, after = encoded[2 * number : 2 * number + 2]
        # Tokens may grow together across the border of prompt and answer, but the server's prompt ends there.
        joined = after[: len(before)] == before
        answer = after[len(before) :] if joined else chat.encode([text])[0]
        answer = answer[: _end_of_turn(answer, chat.tokenizer)]
        _check_stops(answer, messages[index].get("content") or "", chat.tokenizer)
        if not contexts or before[: len(contexts[-1].ids)] != contexts[-1].ids:
            contexts.append(_Context([]))
        context = contexts[-1]
        context.ids, context.last = before + answer, index
        context.spans.append((len(before), len(context.ids)))
    return contexts


def _continuation(messages: Messages, prompt: str, chat: _Chat) -> str | None:
    """What the last message adds to its generation prompt, or None where it does not continue it."""
    whole, answer = chat.text(messages), messages[-1]
    if _calls(answer):
        silent = {**answer, "content": answer.get("content") or "", "tool_calls": None}
        if whole == chat.text([*messages[:-1], silent]):
            raise UnusableError("tool call not shown by the chat template")
    if whole.startswith(prompt):
        return whole[len(prompt) :]
    # The prompt opens a think block and the template hides the one in the content: the answer as the model wrote it.
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, whole, strict=False)))
    block = THINK_BLOCK.match(answer.get("content") or "")
    shown, opened = whole[shared:], prompt[shared:]
    if block is None or opened.strip() != "<think>":
        return None
    visible = answer["content"][block.end() :]
    if not shown.startswith(visible):
        return None
    written = answer["content"].lstrip().removeprefix("<think>")
    return written.removeprefix(opened[opened.index(">") + 1 :]) + shown[len(visible) :]


def _masked(context: _Context, messages: Messages, chat: _Chat) -> Rendered:
    """The answers' tokens, without those inside an answer that the template leaves out of its {% generation %} block.

    Marks that begin elsewhere than generation does are not believed. Whether or not the marks hold the end-of-turn token, it
    is supervised; the line break that some put behind it, and a header before the answer, are not.
    """
    ids = np.asarray(context.ids, dtype=np.int32)
    supervised = np.zeros(len(ids), dtype=bool)
    for start, end in context.spans:
        supervised[start:end] = True
    if not chat.marked:
        return Rendered(ids, supervised, "difference")
    whole, marks = chat.marks(messages[: context.last + 1])
    spans = [(start, end) for start, end in context.spans if start < end]  # a template may show nothing of an answer
    if whole[: len(ids)] != context.ids or not all(marks[start] for start, _ in spans):
        return Rendered(ids, supervised, "difference")
    for start, end in spans:
        last = start + int(np.flatnonzero(marks[start:end])[-1])
        supervised[start : last + 1] = marks[start : last + 1]
    return Rendered(ids, supervised, "marks")


def _check_stops(answer: list[int], content: str, tokenizer: Any) -> None:
    """Raise `UnusableError` where a content spells out a token that ends the answer: no server goes on behind it."""
    ends = {tokenizer.eos_token_id} | (set(answer[-1:]) & set(tokenizer.all_special_ids))
    if any(token in ends and tokenizer.decode([token]) in content for token in answer):
        raise UnusableError("end of turn spelt out in an answer")


def _end_of_turn(answer: list[int], tokenizer: Any) -> int:
    """The length of an answer without the white space after its end-of-turn token, which belongs to the next header.

    No server ever generates the line break that ChatML puts after <|im_end|>: generation has stopped by then.
    """
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    last = max((index for index, token in enumerate(answer) if token in special), default=None)
    if last is not None and not tokenizer.decode(answer[last + 1 :]).strip():
        return last + 1
    return len(answer)
