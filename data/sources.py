"""Files, folders and hub datasets -> documents, one at a time; a row that cannot be read is counted and passed over.

Knows formats. Does not know duplicates, splits or tokenizers.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.data.documents import GROUP, Document, Documents
from draftsmith.data.embedded import embedded_documents
from draftsmith.data.schemas import RowError, read_row
from draftsmith.errors import UserError, first_line

if TYPE_CHECKING:
    from draftsmith.data.corpus import Source

SUFFIXES = {"text": (".txt", ".md", ".rst"), "json": (".jsonl", ".json"), "parquet": (".parquet",)}
CHUNK = 1 << 20  # characters of a .json list that are read at once
BATCH = 256  # Parquet rows that are read at once
SPACE = re.compile(r"\s*")

# Where a row stands, and the row, or why it cannot be read.
Record = tuple[str, Any]


def read_source(source: "Source", into: Documents) -> Iterator[Document]:
    """The documents of one source in a fixed order. What cannot be used is counted in `into`.

    Raises `UserError` for what is missing, damaged as a whole, or has no usable row in a file.
    """
    if source.kind == "python":
        for item in embedded_documents(source.domains):
            into.read += 1
            messages: Any = item.messages
            yield Document(item.name, item.domain, item.group, item.text, messages)
        return
    if source.kind == "hub":
        yield from _usable(_hub(source), source, into, f"data.sources: {source.path}")
        return
    path = Path(source.path or "").expanduser()
    for file, name in _files(path, SUFFIXES[source.kind]):
        try:
            if source.kind == "text":
                yield from _text(file, name, source, into)
            else:
                yield from _usable(READERS[source.kind](file, name), source, into, str(file))
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror or error}); give a readable file") from error


def _files(path: Path, suffixes: tuple[str, ...]) -> list[tuple[Path, str]]:
    """The file itself, or all files with such a suffix below a folder, each with its name for the user."""
    if not path.exists():
        raise UserError(f"data.sources: {path} does not exist; correct the path of this source")
    if not path.is_dir():
        return [(path, _readable(path.name))]
    found = sorted(file for file in path.rglob("*") if file.suffix in suffixes and file.is_file())
    if not found:
        raise UserError(f"{path}: no {', '.join(suffixes)} file in this folder; give a file or another folder")
    return [(file, _readable(file.relative_to(path).as_posix())) for file in found]


def _readable(name: str) -> str:
    """A file's name as text that can be written: bytes of it that are not UTF-8 become \\xff and the like."""
    return os.fsencode(name).decode(errors="backslashreplace")


def _text(file: Path, name: str, source: "Source", into: Documents) -> Iterator[Document]:
    into.read += 1
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 text (byte {error.start}); convert or remove the file") from error
    if text.strip():
        yield Document(name, source.domain or "prose", name, text)
    else:
        into.drop("blank text")


def _usable(records: Iterable[Record], source: "Source", into: Documents, where: str) -> Iterator[Document]:
    """The documents of one file's rows. A bad row is counted; a file of bad rows alone is the user's to mend."""
    good = bad = 0
    problem = ""
    for place, value in records:
        into.read += 1
        try:
            if isinstance(value, RowError):
                raise value
            document = _document(place, value, source)
        except RowError as error:
            bad += 1
            problem = problem or f"{place}: {error}"
            into.drop(error.reason, f"{place}: {error}")
        else:
            good += 1
            yield document
    if bad and not good:
        raise UserError(f"{problem} (none of the {bad} rows of {where} can be used)")


def _document(place: str, row: Any, source: "Source") -> Document:
    content = read_row(row)
    spoken = content.messages is not None or not all(content.supervised or (True,))
    document = Document(place, source.domain or ("chat" if spoken else "prose"), "", *content)
    try:
        # The content, not the line number, decides the side: inserting a row moves no other row across the split.
        text, stated = document.content(), row.get(GROUP)  # several rows of one conversation say so
        group = str(stated) if isinstance(stated, str | int) and stated != "" else text
        (text + group).encode()
    except UnicodeEncodeError as error:
        message = "half a surrogate pair, which is no character; repair the text"
        raise RowError("half a surrogate pair", message) from error
    except (RecursionError, TypeError, ValueError) as error:
        raise RowError("not JSON", f"a message holds what JSON cannot ({error})") from error
    return document._replace(group=group)


def _json(file: Path, name: str) -> Iterator[Record]:
    """A .json file is one list, or else, like a .jsonl file, one object a line."""
    if file.suffix == ".json":
        with file.open("rb") as stream:
            start = stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
        if start.startswith(b"["):
            yield from _elements(file, name)
            return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{name}:{number}", _parsed(line)


def _parsed(line: bytes) -> Any:
    """The line's value, or a `RowError` (not raised)."""
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return RowError("not UTF-8", f"not UTF-8 text ({error.reason}); convert the file")
    except RecursionError:
        return RowError("nested too deeply", "nested too deeply to be read; remove the line")
    except ValueError as error:  # a JSONDecodeError, or a number of more digits than Python reads
        return RowError("not JSON", f"not JSON ({getattr(error, 'msg', error)}); repair or remove the line")


def _elements(file: Path, name: str) -> Iterator[Record]:
    """The elements of a list, while only a part of the file is in memory."""
    decode = json.JSONDecoder().raw_decode
    with file.open(encoding="utf-8-sig") as stream:
        try:
            text = stream.read(CHUNK)
            at, index = SPACE.match(text).end() + 1, 0  # type: ignore[union-attr]
            while True:
                start = SPACE.match(text, at).end()  # type: ignore[union-attr]
                if index == 0 and text[start : start + 1] == "]":
                    return
                try:
                    value, end = decode(text, start)
                    end = SPACE.match(text, end).end()  # type: ignore[union-attr]
                    follows = text[end : end + 1]
                except json.JSONDecodeError as error:
                    follows, problem = "", error.msg
                else:
                    problem = "no comma between two elements" if follows else "the list has no end"
                if follows not in (",", "]"):  # perhaps an element that the part of the file cuts in two
                    more = stream.read(max(CHUNK, len(text) - start))
                    if not more:
                        raise UserError(f"{file}: not JSON ({problem}, at element {index}); give a list of objects")
                    text, at = text[start:] + more, 0
                    continue
                yield f"{name}:{index}", value
                if follows == "]":
                    return
                at, index = end + 1, index + 1
        except UnicodeDecodeError as error:
            raise UserError(f"{file}: not UTF-8 text ({error.reason}); convert the file") from error
        except (RecursionError, ValueError) as error:
            raise UserError(f"{file}: element {index} cannot be read ({error}); repair or remove it") from error


def _parquet(file: Path, name: str) -> Iterator[Record]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file) as table:
            index = 0
            for batch in table.iter_batches(BATCH):
                for value in batch.to_pylist():
                    yield f"{name}:{index}", value
                    index += 1
    except (pyarrow.ArrowException, ValueError) as error:
        reason = first_line(error)
        raise UserError(f"{file}: not a Parquet file that can be read ({reason}); give another file") from error


READERS: dict[str, Callable[[Path, str], Iterator[Record]]] = {"json": _json, "parquet": _parquet}


def _hub(source: "Source") -> Iterator[Record]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        rows = load_dataset(
            source.path, source.config, split=source.split, revision=source.revision, streaming=source.streaming
        )
        yield from ((f"{source.path}:{index}", row) for index, row in enumerate(rows))
    except (DatasetsError, OSError, ValueError) as error:
        reason = first_line(error)
        raise UserError(f"data.sources: {source.path} (split {source.split}) cannot be loaded: {reason}") from error
