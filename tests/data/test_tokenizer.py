"""The tokenizer of a target trained from scratch, and the digest that names a tokenizer (FAULTS 7)."""

from pathlib import Path

import pytest
from kit import tiny_tokenizer
from transformers import AutoTokenizer

from draftsmith.data.documents import Document, Documents
from draftsmith.data.tokenizer import SPECIALS, tokenizer_digest, train_tokenizer
from draftsmith.errors import UserError

USER, ANSWER = {"role": "user", "content": "what is it?"}, {"role": "assistant", "content": "the sum"}


def some_documents() -> Documents:
    documents = Documents()
    for index in range(30):
        text = f"the quick brown fox number {index} jumps over the lazy dog"
        documents.append(Document(str(index), "prose", "", text))
    documents.close([0] * 30)
    return documents


def test_trained_tokenizer_survives_saving_and_marks_answers_itself(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(some_documents(), 280)
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


def test_tokenizer_too_small_for_the_bytes_is_refused() -> None:
    with pytest.raises(UserError, match="at least 262"):
        train_tokenizer(some_documents(), 100)


def test_digest_of_a_tokenizer_changes_with_its_template() -> None:
    assert tokenizer_digest(tiny_tokenizer()) == tokenizer_digest(tiny_tokenizer())
    assert tokenizer_digest(tiny_tokenizer()) != tokenizer_digest(tiny_tokenizer("{{ messages }}"))
