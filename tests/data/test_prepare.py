"""Caps, order, drops by reason, contamination, and the same rows from the same input (FAULTS 3, 6, 7, 11, 68)."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit import tiny_tokenizer

from draftsmith.data import tokenise
from draftsmith.data.corpus import DataSettings, Source
from draftsmith.data.prepare import prepare, shuffled
from draftsmith.data.rows import Rows
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


REWRITING = (  # earlier answers are shortened in the history: each answer gets a row of its own
    "{% for message in messages %}{% if message['role'] == 'user' %}<|user|>{{ message['content'] }}<|end|>"
    "{% else %}<|assistant|>{{ message['content'] if loop.last else message['content'][:3] }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def talks(count: int) -> list[Any]:
    """Conversations of two answers each."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"what is {i}?"},
                ANSWER,
                USER,
                {"role": "assistant", "content": f"{i}"},
            ]
        }
        for i in range(count)
    ]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_files_are_the_same_from_one_process_and_from_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenise, "CHUNK_DOCUMENTS", 3)
    rows = [*texts(40), *talks(20), *({"messages": chat} for chat in TEN)]
    caps = {"train_tokens": {"prose": 500}, "max_length": 64}
    prepare(settings(tmp_path, rows, **caps), tiny_tokenizer(), tmp_path / "one")
    monkeypatch.setattr(tokenise, "POOLED", 0)
    prepare(settings(tmp_path, rows, workers=3, **caps), tiny_tokenizer(), tmp_path / "three")
    assert contents(tmp_path / "one") == contents(tmp_path / "three")


def test_a_process_that_dies_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenise, "POOLED", 0)
    monkeypatch.setattr(tokenise, "windows", lambda *given: os._exit(9))
    with pytest.raises(UserError, match=r"a process that tokenised died, perhaps for memory; set data\.workers=1"):
        prepare(settings(tmp_path, texts(9), workers=2), tiny_tokenizer(), tmp_path / "rows")


def test_an_error_of_the_user_comes_through_from_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenise, "POOLED", 0)
    with pytest.raises(UserError, match="has no chat template"):
        prepare(settings(tmp_path, talks(9), workers=2), tiny_tokenizer(None), tmp_path / "rows")


def test_rows_of_one_conversation_stay_neighbours_and_windows_of_a_text_do_not(tmp_path: Path) -> None:
    rows = [*talks(12), *({"text": f"{i} " + "the quick brown fox " * 20} for i in range(12))]
    prepare(settings(tmp_path, rows, max_length=40), tiny_tokenizer(REWRITING), tmp_path / "rows")
    found = Rows.open(tmp_path / "rows", "train")
    of_chat = [row.document for row in found if row.domain == "chat"]
    assert len(of_chat) > 10
    assert of_chat[::2] == of_chat[1::2]
    assert len(set(of_chat)) == len(of_chat) // 2
    names = [row.document for row in found]
    assert any(a == b for a, b in pairwise(names) if a in of_chat)
    of_text = [row.document for row in found if row.domain == "prose"]
    assert sum(a == b for a, b in pairwise(of_text)) < len(of_text) // 2
    first, second = (row for row in found if row.document == of_chat[0])
    assert len(first.token_ids) < len(second.token_ids)  # in the order of the conversation


def test_shuffling_without_neighbours_is_a_plain_permutation() -> None:
    order = np.random.default_rng(3).permutation(10)
    assert shuffled(np.arange(10, dtype=np.uint64), np.random.default_rng(3)).tolist() == order.tolist()
    units = np.asarray([0, 1, 1, 1, 2, 3, 3], dtype=np.uint64)
    mixed = units[shuffled(units, np.random.default_rng(2))].tolist()
    assert mixed != sorted(mixed)
    assert sum(a != b for a, b in pairwise(mixed)) == 3


def test_rows_that_become_equal_after_cutting_are_kept_once_over_both_splits(tmp_path: Path) -> None:
    rows = [{"text": "the quick brown fox jumps over the lazy dog " + "again " * i} for i in range(1, 40)]
    summary = prepare(settings(tmp_path, rows, max_length=12), tiny_tokenizer(), tmp_path / "rows")
    found = [row.token_ids.tobytes() for split in ("train", "held_out") for row in Rows.open(tmp_path / "rows", split)]
    assert len(found) == len(set(found))
    assert min(summary[split]["drops"]["duplicate row"] for split in ("train", "held_out")) > 0


def test_token_ids_are_taken_as_they_are_and_those_outside_the_vocabulary_are_dropped(tmp_path: Path) -> None:
    size = len(tiny_tokenizer())
    ids = [[9, 8, 7, i % size, i // 100 + 1] for i in range(6, 40)]
    rows = [{"input_ids": row, "loss_mask": [0, 0, 1, 1, 0]} for row in ids]
    rows += [{"input_ids": [5, size], "labels": [-100, size]}, {"input_ids": [5, 6], "labels": [5, -100]}]
    rows += [{"input_ids": [7]}, {"input_ids": []}]
    summary = prepare(settings(tmp_path, rows), tiny_tokenizer(), tmp_path / "rows")
    found = [row for split in ("train", "held_out") for row in Rows.open(tmp_path / "rows", split)]
    assert sorted(row.token_ids.tolist() for row in found) == sorted(ids)
    assert all(row.supervised.tolist() == [False, False, True, True, False] for row in found)
    drops: dict[str, int] = {}
    for split in ("train", "held_out"):
        for reason, count in summary[split]["drops"].items():
            drops[reason] = drops.get(reason, 0) + count
    assert drops == {"token id outside the vocabulary": 1, "nothing supervised": 1, "fewer than two tokens": 2}


def test_held_out_prompts_that_training_rows_hold_as_well_are_counted(tmp_path: Path) -> None:
    def chats(prompts: list[str]) -> list[Any]:
        return [
            {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": f"answer {i}"}]}
            for i, prompt in enumerate(prompts)
        ]

    apart = prepare(settings(tmp_path, chats([f"q{i}" for i in range(40)])), tiny_tokenizer(), tmp_path / "apart")
    held_out = Rows.open(tmp_path / "apart", "held_out")
    assert apart["contamination"] == {"prompts": len(held_out), "repeated": 0}
    half = chats([f"q{i}" if i % 2 else "the same" for i in range(40)])
    mixed = prepare(settings(tmp_path, half), tiny_tokenizer(), tmp_path / "mixed")
    texts_of = [tiny_tokenizer().decode(row.token_ids) for row in Rows.open(tmp_path / "mixed", "held_out")]
    assert mixed["contamination"]["repeated"] == sum("the same" in text for text in texts_of) > 0


def test_the_beginning_of_a_text_is_its_prompt(tmp_path: Path) -> None:
    rows = [{"text": "def add(a, b): return a + b " * 9 + str(i)} for i in range(30)]
    summary = prepare(settings(tmp_path, rows, max_length=256), tiny_tokenizer(), tmp_path / "rows")
    held_out = len(Rows.open(tmp_path / "rows", "held_out"))
    assert summary["contamination"] == {"prompts": held_out, "repeated": held_out}


def test_a_spool_of_a_run_that_was_killed_leaves_no_trace(tmp_path: Path) -> None:
    (tmp_path / "rows" / "spool").mkdir(parents=True)
    (tmp_path / "rows" / "spool" / "token_ids.npy").write_bytes(b"half a row")
    prepare(settings(tmp_path, texts(20)), tiny_tokenizer(), tmp_path / "rows")
    prepare(settings(tmp_path, texts(20)), tiny_tokenizer(), tmp_path / "clean")
    assert contents(tmp_path / "rows") == contents(tmp_path / "clean")


CHILD = """
import json, sys
from pathlib import Path
from transformers import AutoTokenizer
from draftsmith.data.corpus import DataSettings, Source
from draftsmith.data.prepare import prepare

folder = Path(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
peaks = []
for count, words in json.loads(sys.argv[2]):
    file = folder / f"{count}.jsonl"
    with file.open("w") as lines:
        for index in range(count):
            lines.write(json.dumps({"text": f"{index} " + "the quick brown fox " * words + str(index)}) + "\\n")
    sources = (Source(kind="json", path=str(file)),)
    prepare(DataSettings(sources=sources, max_length=512, workers=1), tokenizer, folder / str(count))
    # The peak of this process since its start; unlike ru_maxrss it knows nothing of the process that started it.
    status = Path("/proc/self/status").read_text()
    peaks.append(int(status.split("VmHWM:")[1].split()[0]) * 1024)
    file.unlink()
print(json.dumps(peaks))
"""
LINUX = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")


def peaks(tmp_path: Path, counts: list[tuple[int, int]]) -> list[int]:
    """Peak bytes of one process after preparing each number of rows of so many words, one after the other."""
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    command = [sys.executable, "-c", CHILD, str(tmp_path), json.dumps(counts)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


@LINUX
def test_memory_does_not_grow_with_what_is_prepared(tmp_path: Path) -> None:
    few, many = peaks(tmp_path, [(500, 30), (3000, 30)])
    written = sum(path.stat().st_size for path in (tmp_path / "3000").rglob("*") if path.is_file())
    assert written > 5e6
    assert many - few < written  # a list of all rows takes more than that, beside what every run takes


@pytest.mark.long
@LINUX
def test_a_hundred_thousand_rows_take_no_more_memory_than_ten_thousand(tmp_path: Path) -> None:
    [few], [many] = peaks(tmp_path, [(10_000, 8)]), peaks(tmp_path, [(100_000, 8)])
    assert many <= 1.1 * few


def test_a_cap_below_every_row_is_named_as_what_may_be_wrong(tmp_path: Path) -> None:
    chosen = settings(tmp_path, texts(20), train_tokens={"prose": 3})
    with pytest.raises(UserError, match=r"no supervised token in the train split .* or the caps on tokens \(prose\)"):
        prepare(chosen, tiny_tokenizer(), tmp_path / "rows")
