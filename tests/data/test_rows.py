"""Rows on disk: written one by one, read through a map or from the files, and the same either way."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kit import tiny_rows, tiny_tokenizer

from draftsmith.data.corpus import DataSettings
from draftsmith.data.rows import Row, Rows, write_rows
from draftsmith.data.tokenizer import tokenizer_digest
from draftsmith.errors import UserError

LENGTHS = [5, 2, 9, 1, 30]


def same(a: Row, b: Row) -> bool:
    return (
        np.array_equal(a.token_ids, b.token_ids)
        and np.array_equal(a.supervised, b.supervised)
        and (a.domain, a.document) == (b.domain, b.document)
    )


def test_rows_give_back_what_was_written_by_index_slice_and_iteration(tmp_path: Path) -> None:
    rows = tiny_rows(tmp_path, LENGTHS)
    assert len(rows) == 5
    assert rows.lengths.tolist() == LENGTHS
    assert rows.tokens == sum(LENGTHS)
    assert rows[2].token_ids.dtype == np.int32
    assert rows.domains == ["chat", "code", "prose"]
    assert [(row.domain, row.document) for row in rows][3:] == [("code", "document-3"), ("prose", "document-4")]
    assert rows[-1].token_ids.tolist() == rows[4].token_ids.tolist() == rows[3:][1].token_ids.tolist()
    with pytest.raises(IndexError):
        rows[5]


def test_rows_read_from_the_files_are_those_of_the_map_and_may_be_written_to(tmp_path: Path) -> None:
    rows = tiny_rows(tmp_path, LENGTHS)
    order = [4, 0, 3, 3]
    found = list(rows.read(order))
    assert all(same(row, rows[index]) for row, index in zip(found, order, strict=True))
    found[0].token_ids[0] += 1
    assert not same(found[0], rows[4])


def test_rows_are_taken_one_by_one_and_the_digest_names_content_and_not_names(tmp_path: Path) -> None:
    rows = tiny_rows(tmp_path, LENGTHS)

    def again(name: str, changed: Iterator[Row]) -> str:
        write_rows(changed, tmp_path / name / "train", DataSettings(), tokenizer_digest(tiny_tokenizer()))
        return Rows.open(tmp_path / name, "train").digest

    assert again("same", iter(rows)) == rows.digest
    assert again("names", (row._replace(document="x") for row in rows)) == rows.digest
    assert again("domain", (row._replace(domain="x") for row in rows)) != rows.digest
    assert again("mask", (row._replace(supervised=~row.supervised) for row in rows)) != rows.digest
    assert again("order", rows.read([1, 0, 2, 3, 4])) != rows.digest


def test_rows_that_are_written_again_leave_an_open_map_of_the_old_ones_alone(tmp_path: Path) -> None:
    old = tiny_rows(tmp_path, [500, 700])
    before = [row.token_ids.tolist() for row in old]
    tiny_rows(tmp_path, [3], seed=1)
    assert [row.token_ids.tolist() for row in old] == before


def test_rows_that_were_not_prepared_and_rows_of_another_version_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no prepared rows"):
        Rows.open(tmp_path, "train")
    rows = tiny_rows(tmp_path, LENGTHS)
    about = rows.folder / "rows.json"
    about.write_text(about.read_text().replace('"schema": 3', '"schema": 1'))
    with pytest.raises(UserError, match="rows of schema 1, not 3; run `draftsmith prepare` again"):
        Rows.open(tmp_path / "rows", "train")
