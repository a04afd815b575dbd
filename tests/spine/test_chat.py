"""The terminal chat: the streamed text is the decoded text, whole characters only, and the summary line is true."""

import io
from pathlib import Path
from typing import Any

import pytest
from kit import tiny_target, tiny_target_folder, tiny_tokenizer
from rich.console import Console

import draftsmith.chat
from draftsmith.chat import Stream, answer, chat
from draftsmith.eval.drafters import LMDrafter


def a_console() -> Console:
    return Console(file=io.StringIO(), width=4000, force_terminal=True, color_system="truecolor", _environ={})


def test_the_stream_joins_to_the_decoded_text() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("what does the function return? it returns")["input_ids"]
    stream = Stream(tokenizer)
    assert "".join(stream.piece(i) for i in ids) == tokenizer.decode(ids, skip_special_tokens=True)


def test_an_answer_is_coloured_where_it_was_drafted_and_the_counts_are_true() -> None:
    target, console = tiny_target(), a_console()
    result = answer(target, LMDrafter(target), [7, 8, 9], console, K=3, tree=None, max_new_tokens=12)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"{len(result.tokens)} tokens in {len(result.trace)} verifies" in shown
    assert "\x1b[" in shown


def test_a_chat_answers_every_line_and_remembers(tmp_path) -> None:  # type: ignore[no-untyped-def]
    console = a_console()
    folder = str(tiny_target_folder(tmp_path))
    chat(folder, None, lambda: iter(["hello", "", "again"]), console, K=2, max_new_tokens=4)
    assert console.file.getvalue().count("tokens/verify") == 2  # type: ignore[attr-defined]


class Scripted:
    """A tokenizer whose text of the first n tokens is given."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return self.texts[len(tokens) - 1]


def test_half_a_character_is_held_back_and_shown_at_the_end_of_the_answer() -> None:
    stream = Stream(Scripted("a", "a\ufffd", "aé", "aé\ufffd"))
    assert [stream.piece(0) for _ in range(4)] == ["a", "", "é", ""]
    assert stream.rest() == "\ufffd"
    assert stream.rest() == ""


def test_text_that_decoding_rewrites_goes_on_from_where_it_differs() -> None:
    stream = Stream(Scripted("do ", "do n", "don't", "don't go"))
    assert [stream.piece(0) for _ in range(4)] == ["do ", "n", "n't", " go"]


def test_an_answer_ends_with_what_was_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    target, console = tiny_target(), a_console()
    monkeypatch.setattr("draftsmith.chat.Stream.piece", lambda stream, token: "")
    monkeypatch.setattr("draftsmith.chat.Stream.rest", lambda stream: "the rest")
    answer(target, LMDrafter(target), [7, 8, 9], console, K=3, tree=None, max_new_tokens=4)
    assert "the rest" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_message_beyond_the_context_is_one_line_and_the_chat_remembers_what_was_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    console, prompts = a_console(), []
    decode = draftsmith.chat.speculative_decode

    def spy(target: Any, drafter: Any, prompt: Any, *rest: Any, **options: Any) -> Any:
        prompts.append([message["content"] for message in prompt if message["role"] == "user"])
        return decode(target, drafter, prompt, *rest, **options)

    monkeypatch.setattr("draftsmith.chat.speculative_decode", spy)
    folder = str(tiny_target_folder(tmp_path))
    chat(folder, None, lambda: iter(["hello", "x" * 1000, "again"]), console, K=2, max_new_tokens=4)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.count("tokens/verify") == 2
    assert sum("draftsmith: prompt 0 has" in line for line in shown.splitlines()) == 1
    assert prompts[-1] == ["hello", "again"]
