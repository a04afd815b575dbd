"""Rows on disk: windows, caps, drops by reason, and the same rows from the same input (FAULTS 3, 5, 6)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit import tiny_tokenizer
from transformers import AutoTokenizer

from draftsmith.data.corpus import DataSettings, Source, load_documents
from draftsmith.data.prepare import prepare
from draftsmith.data.rows import Rows
from draftsmith.data.tokenise import windows
from draftsmith.data.tokenizer import SPECIALS, tokenizer_digest, train_tokenizer
from draftsmith.errors import UserError

USER, ANSWER = {"role": "user", "content": "what is it?"}, {"role": "assistant", "content": "the sum"}
TEN = [
    [ANSWER, USER],
    [{"role": "system", "content": "be brief"}],
    [USER, ANSWER, USER],
    [USER, {"role": "assistant", "content": ""}],
    [USER, {"role": "assistant", "content": "  "}],
    [{"role": "user", "content": None}, ANSWER],
    [USER, USER, ANSWER],
    [],
    [USER, {"role": "assistant", "content": None}],
    [{"role": "user", "content": "and now?"}, ANSWER],
]


def source(tmp_path: Path, rows: list[Any]) -> Source:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Source(kind="json", path=str(path))


def texts(count: int) -> list[Any]:
    return [{"text": f"the quick brown fox number {i} jumps over the lazy dog"} for i in range(count)]


def settings(tmp_path: Path, rows: list[Any], **options: Any) -> DataSettings:
    return DataSettings(**({"sources": (source(tmp_path, rows),), "max_length": 32, "held_out": 0.3} | options))


def test_ten_bad_and_good_rows_are_all_counted_by_reason(tmp_path: Path) -> None:
    rows = [*({"messages": chat} for chat in TEN), *texts(20)]
    summary = prepare(settings(tmp_path, rows, max_length=64), tiny_tokenizer(), tmp_path / "rows")
    chat = [summary[split]["domains"].get("chat", {"rows": 0, "drops": {}}) for split in ("train", "held_out")]
    drops: dict[str, int] = {}
    for part in chat:
        for reason, count in part["drops"].items():
            drops[reason] = drops.get(reason, 0) + count
    assert drops == {
        "assistant speaks first": 1,
        "no answer": 1,
        "blank answer": 2,
        "null content": 2,
        "two turns of one role in a row": 1,
        "no messages": 1,
    }
    assert sum(part["rows"] for part in chat) == 2  # the good one, and the one whose last turn is the user's


def test_run_without_a_supervised_token_stops_with_a_clear_error(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(9)]
    with pytest.raises(UserError, match=r"no supervised token in the train split \(dropped: {'no answer': \d}\)"):
        prepare(settings(tmp_path, rows), tiny_tokenizer(), tmp_path / "rows")


@pytest.mark.parametrize(
    ("tokens", "lengths"), [(0, [1]), (1, [3]), (2, [4]), (14, [16]), (15, [16, 2]), (29, [16, 16]), (30, [16, 16, 2])]
)
def test_text_is_cut_into_windows_that_begin_with_bos_and_lose_no_token(tokens: int, lengths: list[int]) -> None:
    tokenizer = tiny_tokenizer()
    body = list(range(10, 10 + tokens))
    cut = windows([0, *body], tokenizer, 16)
    assert [len(row.token_ids) for row in cut] == lengths
    assert all(row.token_ids[0] == 0 for row in cut)
    assert [token for row in cut for token in row.token_ids[1:]] == ([*body, 0] if tokens else [])
    assert all(row.supervised.tolist() == [False] + [True] * (len(row.token_ids) - 1) for row in cut)


def test_windows_of_a_tokenizer_without_bos_and_eos_are_the_bare_text() -> None:
    tokenizer = tiny_tokenizer(bos_token=None, eos_token=None)
    assert [row.token_ids.tolist() for row in windows([9, 8, 7, 6, 5], tokenizer, 3)] == [[9, 8, 7], [6, 5]]


def test_empty_text_is_dropped_with_a_reason(tmp_path: Path) -> None:
    summary = prepare(settings(tmp_path, [{"text": ""}, *texts(20)]), tiny_tokenizer(), tmp_path / "rows")
    both = [summary[split]["drops"].get("fewer than two tokens", 0) for split in ("train", "held_out")]
    assert sum(both) == 1


def test_caps_bound_the_tokens_of_a_domain_and_summary_counts_what_is_on_disk(tmp_path: Path) -> None:
    chosen = settings(tmp_path, texts(40), train_tokens={"prose": 300})
    summary = prepare(chosen, tiny_tokenizer(), tmp_path / "rows")
    rows = Rows.open(tmp_path / "rows", "train")
    assert 268 <= rows.tokens <= 300
    assert summary["train"]["tokens"] == rows.tokens == sum(len(row.token_ids) for row in rows)
    assert summary["train"]["rows"] == len(rows)
    share = sum(int(row.supervised.sum()) for row in rows) / rows.tokens
    assert summary["train"]["supervised_share"] == pytest.approx(share)
    assert summary["held_out"]["tokens"] == Rows.open(tmp_path / "rows", "held_out").tokens


def test_same_input_gives_the_same_rows_and_another_seed_another_order(tmp_path: Path) -> None:
    digests = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        prepare(settings(tmp_path, texts(40), seed=seed), tiny_tokenizer(), tmp_path / name)
        digests.append(Rows.open(tmp_path / name, "train").digest)
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


def test_rows_give_back_their_domain_and_document(tmp_path: Path) -> None:
    prepare(settings(tmp_path, texts(9)), tiny_tokenizer(), tmp_path / "rows")
    rows = Rows.open(tmp_path / "rows", "train")
    assert rows.domains == ["prose"]
    assert rows[0].document.startswith("rows.jsonl:")
    assert rows[-1].token_ids.tolist() == rows[len(rows) - 1].token_ids.tolist()
    assert rows[0].token_ids.dtype == np.int32
    assert rows.lengths.tolist() == [len(row.token_ids) for row in rows]
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_rows_that_were_not_prepared_are_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no prepared rows"):
        Rows.open(tmp_path, "train")


def test_trained_tokenizer_survives_saving_and_marks_answers_itself(tmp_path: Path) -> None:
    documents = load_documents(settings(tmp_path, texts(30)))
    tokenizer = train_tokenizer(documents, 280)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert len(loaded) == 280
    assert tokenizer_digest(loaded) == tokenizer_digest(tokenizer)
    text = "Ünïcode\n\n    def f(x): return x  # → done"
    ids = loaded(text)["input_ids"]
    assert ids[0] == loaded.bos_token_id == loaded.eos_token_id
    assert loaded.decode(ids[1:]) == text
    assert [loaded.convert_tokens_to_ids(token) for token in SPECIALS] == list(range(6))
    out = loaded.apply_chat_template([USER, ANSWER], return_dict=True, return_assistant_tokens_mask=True)
    answer = [i for i, marked in zip(out["input_ids"], out["assistant_masks"], strict=True) if marked]
    assert loaded.decode(answer) == "the sum<|end|>"


def test_tokenizer_too_small_for_the_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least 262"):
        train_tokenizer(load_documents(settings(tmp_path, texts(5))), 100)


def test_digest_of_a_tokenizer_changes_with_its_template() -> None:
    assert tokenizer_digest(tiny_tokenizer()) == tokenizer_digest(tiny_tokenizer())
    assert tokenizer_digest(tiny_tokenizer()) != tokenizer_digest(tiny_tokenizer("{{ messages }}"))
