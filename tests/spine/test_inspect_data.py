"""show-mask: what a user sees of prepared rows, with and without colour, whatever the text holds."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit import CHAT_TEMPLATE, tiny_target_folder, tiny_tokenizer
from rich.console import Console

from draftsmith.cli import main
from draftsmith.config import load_config
from draftsmith.data.chat import render
from draftsmith.data.rows import Row
from draftsmith.inspect_data import masked_text, print_masks

CHAT = [{"role": "user", "content": "what is it?"}, {"role": "assistant", "content": "the sum"}]
ODD = "[bold]a[/] [red [/nothing] \\[x] :smile:"


def shown(row: Row, tokenizer: Any, marks: bool, **options: Any) -> str:
    stream = io.StringIO()
    Console(file=stream, width=400, **options).print(masked_text(row, tokenizer, marks))
    return stream.getvalue()


def row_of(messages: list[Any]) -> Row:
    (rendered,) = render(messages, tiny_tokenizer())
    return Row(rendered.token_ids, rendered.supervised, "chat", "document")


def test_supervised_spans_stand_between_brackets_where_there_is_no_colour() -> None:
    text = shown(row_of(CHAT), tiny_tokenizer(), marks=True)
    assert text == "<|endoftext|><|user|>what is it?<|end|><|assistant|>⟦the sum<|end|>⟧\n"


def test_supervised_spans_and_special_tokens_differ_in_colour() -> None:
    text = masked_text(row_of(CHAT), tiny_tokenizer(), marks=False)
    styles = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    assert styles["the sum"] == "bold green"
    assert styles["what is it?"] == "dim"
    assert (styles["<|end|>"], styles["<|end|><|assistant|>"]) == ("cyan bold", "cyan dim")
    assert "\x1b[" in shown(row_of(CHAT), tiny_tokenizer(), marks=False, force_terminal=True, color_system="truecolor")


def test_markup_and_control_characters_of_the_text_are_shown_as_they_stand() -> None:
    tokenizer = tiny_tokenizer()
    (rendered,) = render([CHAT[0], {"role": "assistant", "content": ODD}], tokenizer)
    assert ODD in shown(Row(*rendered[:2], "chat", "d"), tokenizer, marks=False)

    class Escapes:
        all_special_ids = ()

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return "\x1b[2J\r\x07ok\n"

    row = Row(np.zeros(2, dtype=np.int32), np.zeros(2, dtype=bool), "chat", "d")
    assert shown(row, Escapes(), marks=False) == "\\x1b[2J\\x0d\\x07ok\n\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a prepared run with two domains; the text of one holds markup."""
    folder = tmp_path_factory.mktemp("masks")
    target = tiny_target_folder(folder)
    chats = [{"messages": [{"role": "user", "content": f"{ODD} {n}?"}, CHAT[1]]} for n in range(10)]
    texts = [{"text": f"the quick brown fox number {n}"} for n in range(10)]
    for name, rows in (("chats", chats), ("texts", texts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = ", ".join(f"{{kind: json, path: {folder}/{name}.jsonl}}" for name in ("chats", "texts"))
    config = folder / "x.yaml"
    config.write_text(
        f"run_root: {folder}/runs\ntarget: {{path: {target}}}\ndata: {{sources: [{sources}], held_out: 0.2}}\n"
        "tracking: {trackers: []}\n"
    )
    with pytest.raises(SystemExit) as ended:
        main(["prepare", str(config)])
    assert not ended.value.code
    return config


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_samples_of_each_domain_come_with_share_and_origin_of_their_masks(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = call(capsys, "show-mask", str(run), "--count", "2")
    assert code == 0
    summary = json.loads((run.parent / "runs/x/rows/summary.json").read_text())["train"]["domains"]
    chat, prose = summary["chat"], summary["prose"]
    share = f"{chat['supervised_share']:.1%} of the tokens supervised"
    expected = f"chat: {chat['rows']} rows, {share}; masks: {chat['rows']} by the template's marks"
    assert expected in out.replace("\n", " ")
    assert f"masks: {prose['rows']} of whole texts" in out.replace("\n", " ")
    assert out.count("⟦the sum<|end|>⟧") == 2
    assert "generation" in CHAT_TEMPLATE


def test_one_domain_may_be_chosen_and_an_unknown_one_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = call(capsys, "show-mask", str(run), "--domain", "prose")
    assert "quick" in out
    assert "the sum" not in out
    code, _, err = call(capsys, "show-mask", str(run), "--domain", "poetry")
    assert code == 2
    assert err == "draftsmith: --domain poetry: the train split has chat, prose; give one of them\n"


@pytest.mark.parametrize("content", [None, "{", "[]", '{"train": {"domains": {"other": {}}}}'])
def test_a_summary_that_does_not_fit_the_rows_is_one_line(
    run: Path, content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = run.parent / "runs/x/rows/summary.json"
    before = summary.read_text()
    try:
        summary.unlink() if content is None else summary.write_text(content)
        code, _, err = call(capsys, "show-mask", str(run))
    finally:
        summary.write_text(before)
    assert code == 2
    assert err == f"draftsmith: {summary}: missing, damaged, or of other rows; run `draftsmith prepare` again\n"


def test_output_that_knows_ascii_alone_is_no_crash(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    print_masks(load_config(run).config, "train", 1)
    sys.stdout.flush()
    assert b"\\u27e6the sum" in written.getvalue()
