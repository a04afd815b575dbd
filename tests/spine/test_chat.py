"""The terminal chat: the streamed text is the decoded text, whole characters only, and the summary line is true."""

import io

from kit import tiny_target, tiny_target_folder, tiny_tokenizer
from rich.console import Console

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
