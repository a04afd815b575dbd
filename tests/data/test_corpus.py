"""Schemas, errors that name their place, duplicates, and a split that is the same everywhere (FAULTS 3, 10)."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data import corpus
from draftsmith.data.corpus import DataSettings, Source, load_documents, read_schema, share
from draftsmith.data.embedded import embedded_documents
from draftsmith.errors import UserError

LIBRARY = {
    "good.py": "'''Good things.\n\nMore of them.'''\n\ndef add(a, b):\n"
    "    '''Return the sum of both arguments, always.'''\n    return a + b\n\nclass Box:\n"
    "    '''A box that holds one thing at most, or nothing.'''\n    def open(self):\n"
    "        '''Open the box and return what is inside of it.'''\n    def _close(self):\n"
    "        '''Private, and so never asked about by anybody.'''\n",
    "copy.py": 'def again(a):\n    """Return the sum of both arguments, always."""\n',
    "test/test_good.py": "assert 1\n",
    "site-packages/other.py": "x = 1\n",
    "table.py": "table = {\n" + "".join(f"    'key{i}': {i},\n" for i in range(300)) + "}\n",
    "broken.py": "def (\n",
}


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for name, text in LIBRARY.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def write(path: Path, rows: list[Any]) -> Source:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Source(kind="json", path=str(path))


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def test_code_leaves_out_tests_packages_and_tables(library: Path) -> None:
    assert [item.group for item in embedded_documents(("code",), library)] == ["broken.py", "copy.py", "good.py"]


def test_chat_asks_about_public_definitions_and_never_twice_for_one_answer(library: Path) -> None:
    found = list(embedded_documents(("chat",), library))
    assert [item.name for item in found] == ["chat:copy.py#again", "chat:good.py#Box", "chat:good.py#Box.open"]
    assert found[2].messages is not None
    assert [message["role"] for message in found[2].messages] == ["user", "assistant"]
    assert "Box.open" in (found[2].messages[0]["content"] or "")
    assert found[2].messages[1]["content"] == "Open the box and return what is inside of it."


def test_prose_is_module_docstrings_and_topics(library: Path) -> None:
    found = list(embedded_documents(("prose",), library))
    assert found[0].text == "Good things.\n\nMore of them."
    assert {item.group.rsplit("/", 1)[0] for item in found[1:]} == {"pydoc_data/topics"}


def test_a_file_falls_on_one_side_whatever_its_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    package = Path(asyncio.__file__).parent  # a part of the library: parsing the whole takes seconds
    monkeypatch.setattr(corpus, "embedded_documents", lambda domains: embedded_documents(domains, package))
    documents = load_documents(DataSettings(held_out=0.3))
    sides: dict[str, set[str]] = {}
    for name, split in zip(documents["document"], documents["split"], strict=True):
        group = name.split(":", 1)[1].split("#")[0]
        sides.setdefault(group, set()).add(split)
    assert all(len(found) == 1 for found in sides.values())
    counts = dict.fromkeys(("code", "prose", "chat"), 0)
    for domain, split in zip(documents["domain"], documents["split"], strict=True):
        counts[domain] += split == "held_out"
    assert min(counts.values()) >= 3


def test_side_of_a_name_is_a_fixed_number() -> None:
    assert share("json/decoder.py") == pytest.approx(0.2311743, abs=1e-6)


def test_exact_duplicates_are_removed(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [chat("q", "a"), chat("q", "a"), chat("q", "b"), {"text": "x"}, {"text": "x"}])
    assert len(load_documents(DataSettings(sources=(source,), held_out=0.3))) == 3


def test_few_rows_still_give_both_splits(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [{"text": f"row {i}"} for i in range(5)])
    splits = load_documents(DataSettings(sources=(source,), held_out=1e-9))["split"]
    assert sorted(splits) == ["held_out", "train", "train", "train", "train"]


def test_inserting_a_row_moves_no_other_row_across_the_split(tmp_path: Path) -> None:
    rows = [{"text": f"row {i}"} for i in range(40)]

    def sides(name: str, rows: list[Any]) -> dict[str, str]:
        documents = load_documents(DataSettings(sources=(write(tmp_path / name, rows),), held_out=0.3))
        return dict(zip(documents["text"], documents["split"], strict=True))

    before, after = sides("a.jsonl", rows), sides("b.jsonl", [{"text": "new"}, *rows])
    assert before.items() <= after.items()


def test_sharegpt_and_messages_of_one_chat_are_equal() -> None:
    conversation = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    assert read_schema({"conversations": conversation}, "r") == read_schema(chat("q", "a"), "r")
    assert read_schema({"prompt": "q", "completion": "a"}, "r") == read_schema(chat("q", "a"), "r")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q"}, "unknown schema with fields \\['question'\\]"),
        ([1], "not an object"),
        ({"messages": "hello"}, "field messages is a str"),
        ({"messages": [{"speaker": "me"}]}, "messages\\[0\\]: unknown schema"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "must be text"),
        ({"messages": ["hello"]}, "messages\\[0\\] is a str"),
    ],
)
def test_unknown_schema_is_one_line_naming_file_and_row(tmp_path: Path, row: Any, message: str) -> None:
    source = write(tmp_path / "bad.jsonl", [{"text": "fine"}, row])
    with pytest.raises(UserError, match=f"^bad.jsonl:2.*{message}") as caught:
        load_documents(DataSettings(sources=(source,)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "missing.jsonl does not exist"),
        ("empty.jsonl", "", "no documents"),
        ("half.jsonl", '{"text": "a"}\n{"te', "line 2: not JSON"),
        ("one.jsonl", '{"text": "a"}\n', "no .* documents among 1"),
        ("object.json", "{}", "give a list"),
        ("broken.json", "[", "not JSON"),
    ],
)
def test_unusable_file_is_one_line(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        load_documents(DataSettings(sources=(Source(kind="json", path=str(path)),)))
    assert "\n" not in str(caught.value)


def test_text_folder_is_one_document_a_file(tmp_path: Path) -> None:
    for name in ("b.txt", "a.md", "skip.bin", "blank.txt"):
        (tmp_path / name).write_text("" if name == "blank.txt" else f"text of {name}")
    documents = load_documents(DataSettings(sources=(Source(kind="text", path=str(tmp_path), domain="law"),)))
    assert documents["document"][:] == ["a.md", "b.txt"]
    assert set(documents["domain"]) == {"law"}


def test_empty_text_folder_and_no_sources_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no \.txt"):
        load_documents(DataSettings(sources=(Source(kind="text", path=str(tmp_path)),)))
    with pytest.raises(UserError, match="empty list of sources"):
        load_documents(DataSettings(sources=()))


def test_source_without_path_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a path"):
        Source(kind="json")


@pytest.mark.parametrize("kind", ["json", "text"])
def test_tilde_in_a_path_is_the_home_folder(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "rows").mkdir()
    write(tmp_path / "rows" / "rows.jsonl", [{"text": "one"}, {"text": "two"}])
    for name in ("one", "two"):
        (tmp_path / "rows" / f"{name}.txt").write_text(name)
    path = "~/rows/rows.jsonl" if kind == "json" else "~/rows"
    documents = load_documents(DataSettings(sources=(Source(kind=kind, path=path),)))
    assert sorted(documents["text"][:]) == ["one", "two"]


@pytest.mark.parametrize("name", ["latin.jsonl", "latin.json", "text.txt"])
def test_text_that_is_not_utf_8_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes('[{"text": "é"}]\n'.encode("latin-1"))
    source = Source(kind="text" if name.endswith(".txt") else "json", path=str(tmp_path / name))
    with pytest.raises(UserError, match=rf"{name}: not UTF-8 text") as caught:
        load_documents(DataSettings(sources=(source,)))
    assert "\n" not in str(caught.value)


def test_a_folder_as_a_json_source_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder; a source of kind json is one") as caught:
        load_documents(DataSettings(sources=(Source(kind="json", path=str(tmp_path)),)))
    assert "\n" not in str(caught.value)
