"""Windows of a text, and the order of what several processes tokenise (FAULTS 5, 6)."""

from pathlib import Path

import pytest
from kit import tiny_tokenizer

from draftsmith.data import tokenise
from draftsmith.data.documents import Document, Documents
from draftsmith.data.tokenise import chunks, windows


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


def test_a_chunk_is_bounded_in_documents_and_in_bytes_and_none_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenise, "CHUNK_DOCUMENTS", 3)
    monkeypatch.setattr(tokenise, "CHUNK_BYTES", 400)
    documents = Documents(tmp_path)
    for index, size in enumerate([10, 10, 10, 10, 300, 5, 900, 7]):
        documents.append(Document(str(index), "prose", "", "x" * size))
    documents.close([0] * 8)
    found = [[int(document.name) for document in chunk] for chunk in chunks(documents, [*range(8)])]
    assert found == [[0, 1, 2], [3], [4, 5], [6], [7]]
