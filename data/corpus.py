"""Where text comes from: the embedded Python corpus, JSON or plain text files, hub datasets, as one `datasets.Dataset`.

Knows files, schemas, duplicates and the held-out split. Does not know tokenizers, templates or lengths.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from pydantic import Field, PositiveInt, model_validator

from draftsmith.data.embedded import embedded_documents
from draftsmith.errors import UserError
from draftsmith.settings import Settings

if TYPE_CHECKING:
    from datasets import Dataset

Message = dict[str, str | None]
TEXT_SUFFIXES = (".txt", ".md", ".rst")
# ShareGPT's speakers in the names that chat templates know.
SPEAKERS = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
SCHEMAS = "messages, conversations, text, or prompt with completion"


class Source(Settings):
    """One origin of documents.

    `python`: the text of the running Python installation in the domains code, prose and chat; no path.
    `json`: a .jsonl or .json file. `text`: a plain text file, or a folder of them. `hub`: a name for
    `datasets.load_dataset`.
    """

    kind: Literal["python", "json", "text", "hub"] = "python"
    path: str | None = None
    domain: str | None = None  # of all its documents; None: "chat" for conversations, "prose" for text
    domains: tuple[str, ...] = ("code", "prose", "chat")  # of kind "python" only
    split: str = "train"  # of kind "hub" only

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.kind != "python" and not self.path:
            raise ValueError(f"a source of kind {self.kind!r} needs a path")
        if unknown := set(self.domains) - {"code", "prose", "chat"}:
            raise ValueError(f"unknown domain {sorted(unknown)[0]!r}; the embedded corpus has code, prose, chat")
        return self


class DataSettings(Settings):
    """What is prepared: the sources, the length of a row in tokens, the held-out share and the caps on tokens."""

    sources: tuple[Source, ...] = (Source(),)
    max_length: int = Field(512, ge=2)
    held_out: float = Field(0.05, gt=0.0, lt=1.0)
    train_tokens: dict[str, PositiveInt] = Field(
        default_factory=dict
    )  # cap per domain; one without a cap is taken whole
    held_out_tokens: dict[str, PositiveInt] = Field(default_factory=dict)
    seed: int = Field(0, ge=0)


class Document(NamedTuple):
    """`group` decides the split: documents of one group (one file) always fall on the same side."""

    name: str
    domain: str
    group: str
    text: str | None = None
    messages: list[Message] | None = None

    def content(self) -> str:
        """What makes two documents exact duplicates."""
        return self.text if self.text is not None else json.dumps(self.messages, ensure_ascii=False)


def load_documents(settings: DataSettings) -> "Dataset":
    """All documents of all sources without exact duplicates, in an order that depends on the sources alone.

    Columns: document, domain, split ("train" or "held_out"), text, messages (one of the two is set).
    Raises `UserError` for a missing file, an unknown schema, or when nothing is left to train on.
    """
    documents: list[Document] = []
    splits: list[str] = []
    seen: set[bytes] = set()
    for source in settings.sources:
        found = list(_unique(_read(source), seen))
        documents += found
        splits += _split(found, settings.held_out)
    if not documents:
        raise UserError(f"data.sources: no documents in {_names(settings)}; give a source that has text")
    for split in ("train", "held_out"):
        if split not in splits:
            raise UserError(
                f"data.sources: no {split} documents among {len(documents)} of {_names(settings)}; give more documents"
            )
    return _dataset(documents, splits)


def share(group: str) -> float:
    """A fixed number in [0, 1) for a name, the same on every machine."""
    return int.from_bytes(hashlib.sha256(group.encode()).digest()[:8], "big") / 2**64


def _split(documents: list[Document], held_out: float) -> list[str]:
    """The side of each document. The group of the smallest hash is always held out, so that few documents suffice."""
    shares = {document.group: share(document.group) for document in documents}
    smallest = min(shares.values()) if len(shares) > 1 else -1.0
    sides = {group: "held_out" if value < held_out or value == smallest else "train" for group, value in shares.items()}
    return [sides[document.group] for document in documents]


def _unique(documents: Iterable[Document], seen: set[bytes]) -> Iterator[Document]:
    for document in documents:
        try:
            key = hashlib.sha256(document.content().encode()).digest()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])
            raise UserError(
                f"{document.name}: holds {half}, half a character that no file can hold; repair it"
            ) from error
        if key not in seen:
            seen.add(key)
            yield document


def _dataset(documents: list[Document], splits: list[str]) -> "Dataset":
    from datasets import Dataset, Features, Value

    message = {"role": Value("string"), "content": Value("string")}
    features = Features(
        {
            "document": Value("string"),
            "domain": Value("string"),
            "split": Value("string"),
            "text": Value("large_string"),
            "messages": [message],
        }
    )
    columns = {
        "document": [document.name for document in documents],
        "domain": [document.domain for document in documents],
        "split": splits,
        "text": [document.text for document in documents],
        "messages": [document.messages for document in documents],
    }
    return Dataset.from_dict(columns, features=features)


def _names(settings: DataSettings) -> str:
    return ", ".join(source.path or source.kind for source in settings.sources) or "an empty list of sources"


def _read(source: Source) -> Iterator[Document]:
    if source.kind == "python":
        for item in embedded_documents(source.domains):
            yield Document(item.name, item.domain, item.group, item.text, item.messages)
    elif source.kind == "json":
        yield from _from_records(_json_records(Path(source.path or "").expanduser()), source)
    elif source.kind == "text":
        yield from _text_files(Path(source.path or "").expanduser(), source.domain or "prose")
    else:
        yield from _from_records(_hub_records(source), source)


@dataclass(frozen=True)
class _Record:
    """One JSON object and the place it stands at, for messages to the user."""

    place: str
    value: Any


def _json_records(path: Path) -> Iterator[_Record]:
    """Rows of a .jsonl file (one object a line) or of a .json file (one list)."""
    _require(path)
    if path.is_dir():
        raise UserError(f"data.sources: {path} is a folder; a source of kind json is one .jsonl or .json file")
    try:
        yield from _parsed(path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason}); convert the file") from error


def _parsed(path: Path) -> Iterator[_Record]:
    with path.open(encoding="utf-8") as lines:
        if path.suffix == ".json":
            try:
                rows = json.load(lines)
            except UnicodeDecodeError:
                raise
            except (ValueError, RecursionError) as error:  # also a number of thousands of digits
                raise UserError(f"{path}: not JSON ({error}); give a list of objects") from error
            if not isinstance(rows, list):
                raise UserError(f"{path}: holds one {type(rows).__name__}; give a list of objects, or a .jsonl file")
            yield from (_Record(f"{path.name}:{index}", row) for index, row in enumerate(rows))
            return
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield _Record(f"{path.name}:{number}", json.loads(line))
            except (ValueError, RecursionError) as error:
                reason = getattr(error, "msg", error)
                raise UserError(f"{path}, line {number}: not JSON ({reason}); repair or remove the line") from error


def _hub_records(source: Source) -> Iterator[_Record]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    try:
        rows = load_dataset(source.path, split=source.split)
    except (DatasetNotFoundError, ConnectionError, ValueError, FileNotFoundError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"data.sources: {source.path} (split {source.split}) cannot be loaded: {reason}") from error
    yield from (_Record(f"{source.path}:{index}", row) for index, row in enumerate(rows))


def _from_records(records: Iterable[_Record], source: Source) -> Iterator[Document]:
    for record in records:
        text, messages = read_schema(record.value, record.place)
        domain = source.domain or ("prose" if messages is None else "chat")
        # The content, not the line number, decides the side: inserting a row moves no other row across the split.
        group = text if text is not None else json.dumps(messages, ensure_ascii=False)
        yield Document(record.place, domain, group, text, messages)


def read_schema(row: Any, place: str) -> tuple[str | None, list[Message] | None]:
    """(text, None) or (None, messages) of one JSON row; ShareGPT and messages rows of one chat give equal messages.

    Raises `UserError` naming `place` when the row has none of the known schemas.
    """
    if not isinstance(row, dict):
        raise UserError(f"{place}: a {type(row).__name__}, not an object; rows have {SCHEMAS}")
    for key in ("messages", "conversations"):
        if key in row:
            turns = row[key] if row[key] is not None else []
            if not isinstance(turns, list):
                raise UserError(f"{place}: field {key} is a {type(turns).__name__}; it must be a list of messages")
            return None, [_message(turn, f"{place}: {key}[{index}]") for index, turn in enumerate(turns)]
    if isinstance(row.get("text"), str):
        return row["text"], None
    if isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
        user: Message = {"role": "user", "content": row["prompt"]}
        return None, [user, {"role": "assistant", "content": row["completion"]}]
    raise UserError(f"{place}: unknown schema with fields {sorted(map(str, row))}; rows have {SCHEMAS}")


def _message(turn: Any, place: str) -> Message:
    if not isinstance(turn, dict):
        raise UserError(f"{place} is a {type(turn).__name__}; it must be an object with role and content")
    if "role" in turn:
        role, content = turn["role"], turn.get("content")
    elif "from" in turn:
        role, content = SPEAKERS.get(turn["from"], turn["from"]), turn.get("value")
    else:
        raise UserError(
            f"{place}: unknown schema with fields {sorted(map(str, turn))}; it has role and content, or from and value"
        )
    if not isinstance(role, str) or not isinstance(content, str | None):
        raise UserError(
            f"{place}: role and content must be text, not {type(role).__name__} and {type(content).__name__}"
        )
    return {"role": role, "content": content}


def _text_files(path: Path, domain: str) -> Iterator[Document]:
    _require(path)
    files = sorted(file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES) if path.is_dir() else [path]
    if not files:
        raise UserError(f"{path}: no {', '.join(TEXT_SUFFIXES)} file in this folder; give a file or another folder")
    for file in files:
        name = file.relative_to(path).as_posix() if path.is_dir() else file.name
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{file}: not UTF-8 text (byte {error.start}); convert or remove the file") from error
        if text.strip():
            yield Document(name, domain, name, text)


def _require(path: Path) -> None:
    if not path.exists():
        raise UserError(f"data.sources: {path} does not exist; correct the path of this source")
