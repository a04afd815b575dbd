"""Messages -> token ids and the tokens that an assistant produced, as the tokenizer's own template marks them.

Knows templates. Does not know files or how rows are stored. No header string is searched for: the spans come from the
template's {% generation %} blocks, or else from what the full rendering adds to the generation prompt.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from jinja2.exceptions import TemplateError

from draftsmith.errors import UserError

Messages = Sequence[Mapping[str, str | None]]
GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\b")


class Rendered(NamedTuple):
    """token_ids: int32 [T]; supervised: bool [T], true where the token is part of an answer or its end of turn."""

    token_ids: np.ndarray
    supervised: np.ndarray


class UnusableError(ValueError):
    """A row that nothing can be learnt from. The message is the reason, under which rows are counted."""


def render(messages: Messages, tokenizer: Any) -> list[Rendered]:
    """Token ids of a conversation and the mask of its supervised tokens (role: predicted token).

    Messages after the last answer are left out. One row, unless the template rewrites earlier turns: then each answer
    gets a row with the context that a server would give it. Raises `UnusableError` with a reason, and `UserError`
    without a template.
    """
    messages = usable(messages)
    if not tokenizer.chat_template:
        name = tokenizer.name_or_path or type(tokenizer).__name__
        raise UserError(f"the tokenizer of {name} has no chat template; set its chat_template, or give text sources")
    marked = GENERATION_BLOCK.search(str(tokenizer.chat_template)) is not None and tokenizer.is_fast
    try:
        if marked and not _rewrites(messages, tokenizer):
            return [_by_marks(messages, tokenizer)]
        rows = _by_difference(messages, tokenizer)
    except TemplateError as error:
        raise UnusableError("refused by the chat template") from error
    if not rows:
        raise UnusableError("the template's answer does not continue its generation prompt")
    return rows


def cut(row: Rendered, max_length: int) -> Rendered:
    """The first `max_length` tokens. Raises `UnusableError` with the reason when none of them is supervised."""
    supervised = row.supervised[:max_length].copy()
    supervised[:1] = False  # nothing predicts the first token
    if not supervised.any():
        raise UnusableError(
            "prompt longer than max_length" if len(row.token_ids) > max_length else "nothing supervised"
        )
    return Rendered(row.token_ids[:max_length], supervised)


def usable(messages: Messages) -> Messages:
    """The messages up to the last answer. Raises `UnusableError` with the reason when the conversation is malformed."""
    if not messages:
        raise UnusableError("no messages")
    if any(message["content"] is None for message in messages):
        raise UnusableError("null content")
    answers = _answers(messages)
    if not answers:
        raise UnusableError("no answer")
    kept = messages[: answers[-1] + 1]
    spoken = [message for message in kept if message["role"] != "system"]
    if spoken[0]["role"] == "assistant":
        raise UnusableError("assistant speaks first")
    if any(not (message["content"] or "").strip() for message in kept if message["role"] == "assistant"):
        raise UnusableError("blank answer")
    if any(a["role"] == b["role"] for a, b in pairwise(spoken)):
        raise UnusableError("two turns of one role in a row")
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


def _text(messages: Messages, tokenizer: Any, generation_prompt: bool = False) -> str:
    return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=generation_prompt)


def _encode(text: str, tokenizer: Any) -> list[int]:
    return template_ids(tokenizer(text, add_special_tokens=False, verbose=False))


def _answers(messages: Messages) -> list[int]:
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


def _rewrites(messages: Messages, tokenizer: Any) -> bool:
    """True where the template shows an earlier answer differently once the conversation has gone on."""
    earlier = _answers(messages)[:-1]
    whole = _text(messages, tokenizer) if earlier else ""
    return any(not whole.startswith(_text(messages[: index + 1], tokenizer)) for index in earlier)


def _by_marks(messages: Messages, tokenizer: Any) -> Rendered:
    """The template says itself, by {% generation %}, which tokens are generated."""
    encoded = tokenizer.apply_chat_template(
        list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    mask = np.asarray(encoded["assistant_masks"], dtype=bool).reshape(-1)
    return Rendered(np.asarray(template_ids(encoded), dtype=np.int32), mask)


def _by_difference(messages: Messages, tokenizer: Any) -> list[Rendered]:
    """An answer is what the rendering with it adds to the generation prompt before it.

    The ids before an answer are always those of the generation prompt, as a server would read them; an answer whose
    prompt does not continue the row so far begins another row.
    """
    rows: list[tuple[list[int], list[bool]]] = []
    for index in _answers(messages):
        before_text = _text(messages[:index], tokenizer, generation_prompt=True)
        after_text = _text(messages[: index + 1], tokenizer)
        if not after_text.startswith(before_text):
            continue  # the prompt opens a block that the full rendering lacks: no server would produce this answer
        before, after = _encode(before_text, tokenizer), _encode(after_text, tokenizer)
        # Tokens may grow together across the border of prompt and answer, but the server's prompt ends there.
        joined = after[: len(before)] == before
        answer = after[len(before) :] if joined else _encode(after_text[len(before_text) :], tokenizer)
        answer = answer[: _end_of_turn(answer, tokenizer)]
        if not rows or before[: len(rows[-1][0])] != rows[-1][0]:
            rows.append(([], []))
        ids, mask = rows[-1]
        mask += [False] * (len(before) - len(ids)) + [True] * len(answer)
        ids[:] = before + answer
    return [Rendered(np.asarray(ids, dtype=np.int32), np.asarray(mask, dtype=bool)) for ids, mask in rows]


def _end_of_turn(answer: list[int], tokenizer: Any) -> int:
    """The length of an answer without the white space after its end-of-turn token, which belongs to the next header.

    No server ever generates the line break that ChatML puts after <|im_end|>: generation has stopped by then.
    """
    special = set(tokenizer.all_special_ids)
    last = max((index for index, token in enumerate(answer) if token in special), default=None)
    if last is not None and not tokenizer.decode(answer[last + 1 :]).strip():
        return last + 1
    return len(answer)
