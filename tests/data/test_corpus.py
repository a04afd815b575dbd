"""Schemas, errors that name their place, duplicates, and a split that is the same everywhere (FAULTS 3, 10)."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data import sources
from draftsmith.data.corpus import DataSettings, Source, load_documents, share
from draftsmith.data.documents import SPLITS, Documents
from draftsmith.data.embedded import embedded_documents
from draftsmith.errors import UserError
from draftsmith.run import stamp

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


def sides_of(documents: Documents) -> list[str]:
    return [SPLITS[side] for side in documents.splits]


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
    monkeypatch.setattr(sources, "embedded_documents", lambda domains: embedded_documents(domains, package))
    documents = load_documents(DataSettings(held_out=0.3))
    sides: dict[str, set[str]] = {}
    for document, split in zip(documents, sides_of(documents), strict=True):
        group = document.name.split(":", 1)[1].split("#")[0]
        sides.setdefault(group, set()).add(split)
    assert all(len(found) == 1 for found in sides.values())
    counts = dict.fromkeys(("code", "prose", "chat"), 0)
    for document, split in zip(documents, sides_of(documents), strict=True):
        counts[document.domain] += split == "held_out"
    assert min(counts.values()) >= 3


def test_side_of_a_name_is_a_fixed_number() -> None:
    assert share("json/decoder.py") == pytest.approx(0.2311743, abs=1e-6)


def test_exact_duplicates_are_removed(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [chat("q", "a"), chat("q", "a"), chat("q", "b"), {"text": "x"}, {"text": "x"}])
    documents = load_documents(DataSettings(sources=(source, source), held_out=1e-9))
    assert len(documents) == 3
    assert documents.summary() == {"read": 10, "kept": 3, "drops": {"duplicate document": 7}, "first": {}}


def test_few_rows_still_give_both_splits(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [{"text": f"row {i}"} for i in range(5)])
    documents = load_documents(DataSettings(sources=(source,), held_out=1e-9))
    assert sorted(sides_of(documents)) == ["held_out", "train", "train", "train", "train"]


def test_inserting_a_row_moves_no_other_row_across_the_split(tmp_path: Path) -> None:
    rows = [{"text": f"row {i}"} for i in range(40)]

    def sides(name: str, rows: list[Any]) -> dict[str, str]:
        documents = load_documents(DataSettings(sources=(write(tmp_path / name, rows),), held_out=0.3))
        return {str(document.text): side for document, side in zip(documents, sides_of(documents), strict=True)}

    before, after = sides("a.jsonl", rows), sides("b.jsonl", [{"text": "new"}, *rows])
    assert before.items() <= after.items()


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
    source = write(tmp_path / "bad.jsonl", [row, row])
    with pytest.raises(UserError, match=f"^bad.jsonl:1: .*{message}.*none of the 2 rows of {tmp_path}") as caught:
        load_documents(DataSettings(sources=(source,)))
    assert "\n" not in str(caught.value)


def test_a_bad_row_among_good_ones_is_counted_with_its_place_and_stops_nothing(tmp_path: Path) -> None:
    lines = ['{"text": "one"}', '{"te', '{"text": "two"}', "[1]", '{"q": 1}', '{"text": NaN}', '{"text": "\\ud800"}']
    lines += [
        "[" * 100_000,
        '{"text": ' + "9" * 5000 + "}",
        '{"messages": [{"role": "user", "content": [1]}]}',
        '{"a": 2}',
    ]
    (tmp_path / "mixed.jsonl").write_bytes("\n".join(lines).encode() + b'\n{"text": "\xff"}\n')
    source = Source(kind="json", path=str(tmp_path / "mixed.jsonl"))
    documents = load_documents(DataSettings(sources=(source,), held_out=1e-9))
    assert [document.text for document in documents] == ["one", "two"]
    assert documents.drops == {
        "not JSON": 2,
        "not an object": 1,
        "unknown schema": 3,
        "half a surrogate pair": 1,
        "nested too deeply": 1,
        "content is not text": 1,
        "not UTF-8": 1,
    }
    assert documents.read == 12
    assert documents.first["unknown schema"].startswith("mixed.jsonl:5: unknown schema with fields ['q']")
    assert all("\n" not in line and len(line) < 300 for line in documents.first.values())


def test_a_stated_group_decides_the_side_be_it_text_or_a_number_and_an_empty_one_states_nothing(tmp_path: Path) -> None:
    rows = [
        {"text": f"text {index}", "draftsmith_group": group}
        for index, group in enumerate([*[7] * 20, *["a"] * 20, *[""] * 20])
    ]
    source = write(tmp_path / "rows.jsonl", [*rows, {"text": "of no character", "draftsmith_group": "\ud800"}])
    documents = load_documents(DataSettings(sources=(source,), held_out=0.5))
    sides = sides_of(documents)
    assert len(set(sides[:20])) == len(set(sides[20:40])) == 1
    assert len(set(sides[40:])) == 2
    assert documents.drops == {"half a surrogate pair": 1}


@pytest.mark.parametrize(("kind", "suffix"), [("text", b".txt"), ("json", b".jsonl")])
def test_a_file_whose_name_is_not_utf_8_is_read_and_its_name_can_be_written(
    kind: Any, suffix: bytes, tmp_path: Path
) -> None:
    for number in range(3):
        path = os.path.join(os.fsencode(tmp_path), b"\xff%d" % number + suffix)
        with open(path, "wb") as file:
            file.write(b'{"text": "number %d"}\n' % number)
    documents = load_documents(DataSettings(sources=(Source(kind=kind, path=str(tmp_path)),)))
    assert [document.name[:5] for document in documents] == ["\\xff0", "\\xff1", "\\xff2"]
    assert stamp(tmp_path, content=True) != "missing"


def test_one_good_file_does_not_excuse_a_file_of_bad_rows(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    write(tmp_path / "b.jsonl", [{"txt": "one"}])
    with pytest.raises(UserError, match=r"^b.jsonl:1: unknown schema"):
        load_documents(DataSettings(sources=(Source(kind="json", path=str(tmp_path)),)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "missing.jsonl does not exist"),
        ("empty.jsonl", "", "no documents"),
        ("half.jsonl", '{"te', "^half.jsonl:1: not JSON"),
        ("one.jsonl", '{"text": "a"}\n', "no .* documents among 1"),
        ("object.json", "{}", "unknown schema with fields"),
        ("half.json", '[{"text": "a"}', "half.json: not JSON .*at element 0"),
        ("commas.json", '[{"text": "a"} {"text": "b"}]', "no comma between two elements"),
        ("deep.json", "[" * 100_000, "deep.json: element 0 cannot be read"),
        ("broken.json", "[", "broken.json: not JSON"),
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
    assert [document.name for document in documents] == ["a.md", "b.txt"]
    assert documents.domains == ["law"]
    assert documents.drops == {"blank text": 1}


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
    assert sorted(str(document.text) for document in documents) == ["one", "two"]


@pytest.mark.parametrize("name", ["latin.json", "text.txt"])
def test_text_that_is_not_utf_8_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes('[{"text": "é"}]\n'.encode("latin-1"))
    source = Source(kind="text" if name.endswith(".txt") else "json", path=str(tmp_path / name))
    with pytest.raises(UserError, match=rf"{name}: not UTF-8 text") as caught:
        load_documents(DataSettings(sources=(source,)))
    assert "\n" not in str(caught.value)


def test_a_folder_of_json_is_all_its_files_and_a_folder_named_like_a_file_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").mkdir()
    (tmp_path / "x.txt").mkdir()
    write(tmp_path / "x.jsonl" / "a.jsonl", [{"text": "one"}])
    (tmp_path / "b.json").write_text('\ufeff [{"text": "two"}, {"text": "three"}]')
    (tmp_path / "c.json").write_text('{"text": "four"}\n{"text": "five"}\n')
    (tmp_path / "x.txt" / "d.txt").write_text("six")
    sources = (Source(kind="json", path=str(tmp_path)), Source(kind="text", path=str(tmp_path / "x.txt")))
    documents = load_documents(DataSettings(sources=sources, held_out=1e-9))
    assert [document.text for document in documents] == ["two", "three", "four", "five", "one", "six"]
    assert documents[4].name == "x.jsonl/a.jsonl:1"


def test_a_json_list_is_read_in_parts_with_the_result_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": f"row, [{index}] " + '"]}' * index, "n": index} for index in range(30)]
    (tmp_path / "list.json").write_text(json.dumps(rows, indent=1))
    for chunk in (1, 7, 1 << 20):
        monkeypatch.setattr(sources, "CHUNK", chunk)
        source = Source(kind="json", path=str(tmp_path / "list.json"))
        assert [document.text for document in load_documents(DataSettings(sources=(source,)))] == [
            r["text"] for r in rows
        ]


def test_parquet_and_hub_rows_equal_the_same_rows_as_json(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    # Parquet gives every message every field: the null ones are not there for a template either.
    calls = [{"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]
    called = {"role": "assistant", "content": None, "tool_calls": calls}
    rows = [chat("q", "a"), {"messages": [{"role": "user", "content": "q"}, called]}]
    (tmp_path / "hub").mkdir()
    write_table(pyarrow.Table.from_pylist(rows), tmp_path / "hub" / "train.parquet")
    found = {}
    for source in (
        write(tmp_path / "rows.jsonl", rows),
        Source(kind="parquet", path=str(tmp_path / "hub" / "train.parquet")),
        Source(kind="parquet", path=str(tmp_path / "hub")),
        Source(kind="hub", path=str(tmp_path / "hub")),
        Source(kind="hub", path=str(tmp_path / "hub"), streaming=True),
    ):
        documents = load_documents(DataSettings(sources=(source,), held_out=1e-9))
        found[source] = [
            (document.messages, side) for document, side in zip(documents, sides_of(documents), strict=True)
        ]
    expected = found.popitem()[1]
    assert expected[1][0] == [{"role": "user", "content": "q"}, called]
    assert all(documents == expected for documents in found.values())


def test_a_split_and_a_config_reach_load_dataset_and_a_wrong_one_is_one_line(tmp_path: Path) -> None:
    for name in ("train", "test"):
        write(tmp_path / f"{name}.jsonl", [{"text": f"{name} {index}"} for index in range(3)])
    source = Source(kind="hub", path=str(tmp_path), split="test")
    assert all("test" in str(document.text) for document in load_documents(DataSettings(sources=(source,))))
    for wrong in ({"split": "nowhere"}, {"config": "nothing"}, {"path": str(tmp_path / "not-there")}):
        with pytest.raises(UserError, match=r"^data.sources: .* cannot be loaded: ") as caught:
            load_documents(DataSettings(sources=(source.model_copy(update=wrong),)))
        assert "\n" not in str(caught.value)


def test_a_damaged_parquet_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1 not really PAR1")
    with pytest.raises(UserError, match=r"x\.parquet: not a Parquet file that can be read") as caught:
        load_documents(DataSettings(sources=(Source(kind="parquet", path=str(tmp_path / "x.parquet")),)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["train_tokens", "held_out_tokens"])
def test_a_cap_on_a_domain_that_no_source_has_is_refused_by_name(name: str) -> None:
    sources = (Source(kind="text", path="x"), Source(kind="json", path="y", domain="law"))
    DataSettings(sources=sources, **{name: {"prose": 5, "law": 5}})
    with pytest.raises(ValueError, match=rf"{name}: no source has the domain 'chat' \(there are: law, prose\)"):
        DataSettings(sources=sources, **{name: {"law": 5, "chat": 5}})


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "json", "path": "x", "streaming": True},
        {"kind": "text", "path": "x", "revision": "main"},
        {"kind": "json", "path": "x", "domains": ("code",)},
        {"domain": "code"},
        {"path": "x"},
    ],
)
def test_a_field_that_a_source_of_this_kind_would_ignore_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{list(fields)[-1]} means nothing to a source of kind"):
        Source(**fields)
