"""Prompts from files: the user's JSONL, MT-bench-style question files, Spec-Bench's. Held-out rows are `acceptance`'s.

Knows files, chat templates and how a conversation goes on after an answer; decodes nothing.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from draftsmith.errors import UserError, first_line
from draftsmith.eval.settings import EvalSettings
from draftsmith.models.target import Target

#: Spec-Bench (arXiv 2401.07851) files its MT-bench questions under MT-bench's own categories, all others under these five.
SPEC_BENCH = ("translation", "summarization", "qa", "math_reasoning", "rag")
MULTI_TURN = "multi-turn"
# A template is a program that meets messages which its author did not foresee.
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError)
FORMS = ("prompt", "messages", "turns")
NO_DOMAIN = "questions"


@dataclass(frozen=True)
class Question:
    """A conversation to be played: `messages` that stand before it, and what the user says in each of its `turns`."""

    messages: tuple[Mapping[str, Any], ...]
    turns: tuple[str, ...]

    def asked(self, answers: Sequence[str]) -> list[Mapping[str, Any]]:
        """The messages that the target answers next, when it has given these answers."""
        said = [*self.messages]
        for turn, answer in zip(self.turns, answers, strict=False):
            said += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
        return [*said, {"role": "user", "content": self.turns[len(answers)]}]


#: What is decoded: token ids as they are, or a conversation.
Prompt = list[int] | Question


class Writer:
    """Conversations as token ids, by the target's chat template, or without one as their contents in separate paragraphs."""

    def __init__(self, target: Target, template: str = "target") -> None:
        self._target, self.plain = target, template == "none"

    @property
    def template(self) -> dict[str, Any] | None:
        """What is recorded of the chat template; None where there is none, or where it is not used."""
        if self.plain or not self._target.has_tokenizer:
            return None
        try:
            text = self._target.tokenizer.get_chat_template()
        except ValueError:  # there is none
            return None
        return {"hash": hashlib.sha256(text.encode()).hexdigest()[:16], "text": text, "add_generation_prompt": True}

    def text(self, text: str) -> list[int]:
        """The ids of plain text."""
        return [int(token) for token in self._target.tokenizer(text)["input_ids"]]

    def ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids that the target reads before it answers. Raises UserError."""
        if self.plain:
            return self.text("".join(f"{message['content']}\n\n" for message in messages))
        if self.template is None:
            raise UserError(
                "evaluation.questions: they are chats, and the target's tokenizer has no chat template; give it one, or set "
                "evaluation.template=none to join their contents as plain text"
            )
        try:
            said = self._target.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, return_dict=True
            )
        except TEMPLATE_ERRORS as error:
            raise UserError(
                f"evaluation.questions: the target's chat template refuses {list(messages)!r:.80} ({first_line(error)})"
            ) from error
        return [int(token) for token in said["input_ids"]]

    def first(self, prompt: Prompt) -> list[int]:
        """The ids of a prompt's first turn."""
        return self.ids(prompt.asked([])) if isinstance(prompt, Question) else prompt

    def following(self, prompt: Prompt, answers: Sequence[Sequence[int]], room: int) -> list[int] | None:
        """The ids of the turn after these answers; None where there is none, or where it takes more than `room` tokens."""
        if not isinstance(prompt, Question) or len(answers) == len(prompt.turns):
            return None
        tokenizer = self._target.tokenizer
        ids = self.ids(prompt.asked([tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]))
        return ids if len(ids) <= room else None


def read_questions(
    path: Path, settings: EvalSettings, writer: Writer, room: int
) -> tuple[dict[str, list[Prompt]], int]:
    """The first `prompts` usable prompts of each domain of a JSONL file, and how many were too long for `room` tokens.

    A line has one of `prompt` (text that is continued as it stands), `messages` (the last one from the user) and `turns` (what the
    user says, one answer after each), and may have `domain` or `category`. In a Spec-Bench file the categories of MT-bench are one
    domain, "multi-turn". Raises UserError naming file, line and field.
    """
    lines = list(_lines(path))
    categories = {str(line.get("category", "")) for _, line in lines}
    found: dict[str, list[Prompt]] = {domain: [] for domain in settings.domains or ()}
    too_long = 0
    for number, line in lines:
        domain = _domain(line, spec_bench=bool(categories & set(SPEC_BENCH)))
        prompts = found.setdefault(domain, []) if settings.domains is None else found.get(domain)
        if prompts is None or len(prompts) == settings.prompts:
            continue
        prompt = _prompt(line, f"{path}, line {number}", writer)
        if len(writer.first(prompt)) > room:
            too_long += 1
        else:
            prompts.append(prompt)
    if empty := [domain for domain, prompts in found.items() if not prompts]:
        raise UserError(
            f"evaluation.questions: {path} has no usable prompt of {', '.join(empty)} ({too_long} have more than {room} tokens, "
            "which is what max_new_tokens and K leave of the target's context); set evaluation.domains to null or to what it has"
        )
    return found, too_long


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"evaluation.questions: {path} cannot be read ({error}); give a JSONL file") from error
    count = 0
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: not JSON ({error}); write one object per line") from error
        if not isinstance(value, dict):
            raise UserError(
                f"{path}, line {number}: not an object; write one with {', '.join(FORMS[:-1])} or {FORMS[-1]}"
            )
        count += 1
        yield number, value
    if not count:
        raise UserError(f"evaluation.questions: {path} is empty; write one object per line")


def _domain(line: Mapping[str, Any], spec_bench: bool) -> str:
    if "domain" in line:
        return str(line["domain"])
    category = str(line.get("category", NO_DOMAIN))
    return MULTI_TURN if spec_bench and category not in SPEC_BENCH else category


def _prompt(line: Mapping[str, Any], place: str, writer: Writer) -> Prompt:
    forms = [name for name in FORMS if line.get(name)]
    if len(forms) != 1:
        raise UserError(f"{place}: has {' and '.join(forms) or 'none'} of {', '.join(FORMS)}; give exactly one")
    [form], value = forms, line[forms[0]]
    if form == "prompt":
        if not isinstance(value, str):
            raise UserError(f"{place}: prompt is no text; write a string, or use messages")
        return writer.text(value)
    if form == "turns":
        if not isinstance(value, list) or not all(isinstance(turn, str) and turn for turn in value):
            raise UserError(f"{place}: turns is no list of texts; write what the user says, one string per turn")
        return Question((), tuple(value))
    if not isinstance(value, list) or not all(_is_message(message) for message in value):
        raise UserError(f"{place}: messages is no list of objects with role and content")
    if value[-1]["role"] != "user":
        raise UserError(f"{place}: the last of the messages is from {value[-1]['role']}; end with the user's")
    return Question(tuple(value[:-1]), (value[-1]["content"],))


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def stored(prompts: Mapping[str, Sequence[Prompt]]) -> dict[str, list[Any]]:
    """Prompts as JSON: ids as one string each, conversations as objects."""
    return {
        domain: [
            {"messages": [dict(m) for m in prompt.messages], "turns": list(prompt.turns)}
            if isinstance(prompt, Question)
            else " ".join(map(str, prompt))
            for prompt in asked
        ]
        for domain, asked in prompts.items()
    }


def restored(prompts: Mapping[str, Sequence[Any]]) -> dict[str, list[Prompt]]:
    """The inverse of `stored`. Raises LookupError, TypeError or ValueError for what it did not write."""
    return {
        domain: [
            [int(token) for token in prompt.split()]
            if isinstance(prompt, str)
            else Question(tuple(prompt["messages"]), tuple(prompt["turns"]))
            for prompt in asked
        ]
        for domain, asked in prompts.items()
    }
