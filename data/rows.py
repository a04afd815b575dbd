"""Token rows with loss masks on disk: written one after the other by `prepare`, read memory-mapped by every later stage.

Knows the files of a row folder. Does not know where rows come from, targets or caches.
"""

import json
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tokenize import TokenError  # NumPy reads the head of an array with Python's own tokenizer
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import xxhash

from draftsmith.data.documents import SPLITS as SPLITS  # the folders below the one that `prepare` writes
from draftsmith.errors import UserError, first_line
from draftsmith.files import publish, publish_json

if TYPE_CHECKING:
    from draftsmith.data.corpus import DataSettings

SCHEMA = 3
# The columns of a row folder whose entries are one number a row; `token_ids`, `supervised`, `names` are one a token or byte.
OF_EACH_ROW = ("offsets", "domain_of", "name_offsets", "shared")
BUFFER = 1 << 20
SHORTEST_SHARED = (
    16  # tokens; windows of one text begin with the same token or two, which is not worth a second look-up
)


class Row(NamedTuple):
    """token_ids: int32 [T]; supervised: bool [T], true where token t is trained as a predicted token (never t = 0).

    document: the place of its text in the sources; rows of one document have the same.
    """

    token_ids: np.ndarray
    supervised: np.ndarray
    domain: str
    document: str


def shared_prefix(before: Row | None, row: Row) -> int:
    """How many tokens at its beginning a row has in common with the one before it, of the same document; 0 if few.

    Never all of them: a row has something of its own.
    """
    if before is None or before.document != row.document:
        return 0
    most = min(len(before.token_ids), len(row.token_ids) - 1)
    differ = np.flatnonzero(before.token_ids[:most] != row.token_ids[:most])
    common = int(differ[0]) if len(differ) else most
    return common if common >= SHORTEST_SHARED else 0


class Rows(Sequence[Row]):
    """The rows of one split. Nothing is read before it is asked for."""

    def __init__(self, folder: Path) -> None:
        """Use `Rows.open`."""
        self.folder = folder
        about = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
        if about["schema"] != SCHEMA:
            raise UserError(f"{folder}: rows of schema {about['schema']}, not {SCHEMA}; run `draftsmith prepare` again")
        self.domains: list[str] = about["domains"]  # the distinct names
        self.digest: str = about["digest"]  # of ids, masks, windows, shared prefixes and domains
        self.tokenizer: str = about["tokenizer"]
        self.settings: dict[str, Any] = about["settings"]
        self._ids = np.load(folder / "token_ids.npy", mmap_mode="r")
        self._supervised = np.load(folder / "supervised.npy", mmap_mode="r")
        self._names = np.load(folder / "names.npy", mmap_mode="r")
        self.offsets: np.ndarray = np.load(folder / "offsets.npy")
        self._domain_of: np.ndarray = np.load(folder / "domain_of.npy")
        self._name_offsets: np.ndarray = np.load(folder / "name_offsets.npy")
        self.shared: np.ndarray = np.load(folder / "shared.npy")  # int32 [rows]: see `shared_prefix`

    @classmethod
    def open(cls, folder: Path, split: str) -> "Rows":
        """The rows that `prepare` wrote. Raises `UserError` when there are none."""
        place = Path(folder) / split
        if not (place / "rows.json").is_file():
            raise UserError(f"{place}: no prepared rows; run `draftsmith prepare` first")
        try:
            rows = cls(place)
        except (OSError, ValueError, KeyError, TypeError, EOFError, RecursionError, SyntaxError, TokenError) as error:
            reason = first_line(error)
            raise UserError(f"{place}: damaged rows ({reason}); run `draftsmith prepare` again") from error
        if damage := rows._misfit():
            raise UserError(f"{place}: damaged rows ({damage}); run `draftsmith prepare` again")
        return rows

    def _misfit(self) -> str:
        """What does not fit together among the arrays, "" where all does."""
        edges = (self.offsets, self._name_offsets)
        if any(array.ndim != 1 for array in (self._ids, self._supervised, self._names, self._domain_of, *edges)):
            return "an array is not a list of numbers"
        if len(self._ids) != len(self._supervised):
            return "ids and masks have other lengths"
        for offsets, whole in zip(edges, (self._ids, self._names), strict=True):
            if len(offsets) != len(self._domain_of) + 1 or offsets[0] != 0 or offsets[-1] != len(whole):
                return "offsets are not those of the rows"
            if (np.diff(offsets) < 0).any():
                return "offsets are not those of the rows"
        domains = self._domain_of
        if not isinstance(self.domains, list) or (
            len(domains) and not 0 <= domains.min() <= domains.max() < len(self.domains)
        ):
            return "a domain is not in the list of names"
        lengths = self.lengths
        before = np.concatenate([[0], lengths[:-1]])
        if self.shared.shape != lengths.shape or self.shared.dtype != np.int32:
            return "shared prefixes are not those of the rows"
        if not ((self.shared >= 0) & (self.shared <= before) & (self.shared < np.maximum(lengths, 1))).all():
            return "a shared prefix is longer than its rows"
        return ""

    def __len__(self) -> int:
        return len(self._domain_of)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        span, name = (slice(int(o[index]), int(o[index + 1])) for o in (self.offsets, self._name_offsets))
        document = self._names[name].tobytes().decode(errors="replace")
        return Row(np.array(self._ids[span]), np.array(self._supervised[span]), self.domain(index), document)

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def read(self, order: Iterable[int]) -> Iterator[Row]:
        """Rows by index, read from the files and not through the map, whose pages would all count as this process's memory."""
        with ExitStack() as stack:
            columns = []
            for mapped, offsets in ((self._ids, self.offsets), (self._supervised, self.offsets), (self._names, None)):
                assert isinstance(mapped, np.memmap)
                file = stack.enter_context(open(str(mapped.filename), "rb", buffering=0))
                columns.append((file, mapped.dtype, mapped.offset, self._name_offsets if offsets is None else offsets))
            for index in order:
                ids, supervised, name = (_span(*column, index) for column in columns)
                yield Row(ids, supervised, self.domain(index), name.tobytes().decode())

    def domain(self, index: int) -> str:
        """The domain of a row, without reading its tokens."""
        return self.domains[self._domain_of[index]]

    @property
    def lengths(self) -> np.ndarray:
        """int64 [rows]: tokens of each row."""
        return np.diff(self.offsets)

    @property
    def tokens(self) -> int:
        """Tokens of all rows together."""
        return int(self.offsets[-1])


def _span(file: Any, dtype: np.dtype, first: int, offsets: np.ndarray, index: int) -> np.ndarray:
    """Entries offsets[index]:offsets[index + 1] of the .npy file whose data begin at byte `first`."""
    start, end = int(offsets[index]), int(offsets[index + 1])
    data = os.pread(file.fileno(), (end - start) * dtype.itemsize, first + start * dtype.itemsize)
    return np.frombuffer(bytearray(data), dtype=dtype)


class _Column:
    """A .npy file of one dimension that grows. Its header is written again at the end, in the room that numpy leaves."""

    def __init__(self, path: Path, dtype: type) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # never written over: another process may have mapped it
        self.dtype, self.count, self.hash = np.dtype(dtype), 0, xxhash.xxh3_128()
        self._file = path.open("wb", buffering=BUFFER)
        self._first = self._header()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._header() != self._first:
            raise RuntimeError(f"{self._file.name}: the header of {self.count} entries has another length")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def _header(self) -> int:
        """Write the header; returns the byte at which the data begin."""
        self._file.seek(0)
        about = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (self.count,)}
        np.lib.format.write_array_header_1_0(self._file, about)
        return self._file.tell()

    def append(self, values: np.ndarray) -> None:
        data = np.ascontiguousarray(values, dtype=self.dtype).tobytes()
        self._file.write(data)
        self.hash.update(data)
        self.count += len(values)


def write_rows(rows: Iterable[Row], folder: Path, settings: "DataSettings", tokenizer: str) -> None:
    """Write one split, row by row. `tokenizer` is its digest. `rows.json` comes last: without it nothing is prepared."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.json").unlink(missing_ok=True)
    offsets, name_offsets, domain_of, shared = array("q", [0]), array("q", [0]), array("H"), array("i")
    before: Row | None = None
    seen: dict[str, int] = {}
    with ExitStack() as stack:
        columns = (("token_ids", np.int32), ("supervised", np.bool_), ("names", np.uint8))
        ids, supervised, names = (
            stack.enter_context(_Column(folder / f"{name}.npy", dtype)) for name, dtype in columns
        )
        for row in rows:
            ids.append(row.token_ids)
            supervised.append(row.supervised)
            names.append(np.frombuffer(row.document.encode(), dtype=np.uint8))
            offsets.append(ids.count)
            name_offsets.append(names.count)
            domain_of.append(seen.setdefault(row.domain, len(seen)))
            shared.append(shared_prefix(before, row))
            before = row
    domains = sorted(seen)
    place = np.asarray([domains.index(name) for name in seen], dtype=np.uint16)
    columns_of_rows = (np.asarray(offsets), place[np.asarray(domain_of)], name_offsets, np.asarray(shared))
    small = dict(zip(OF_EACH_ROW, columns_of_rows, strict=True))
    for name, column in small.items():
        publish(folder / f"{name}.npy", lambda path, column=column: _save(path, column))  # type: ignore[misc]
    content = xxhash.xxh3_128(json.dumps(domains).encode())
    for part in (ids.hash.digest(), supervised.hash.digest()):
        content.update(part)
    for name in (
        "offsets",
        "domain_of",
        "shared",
    ):  # what is shared depends on the documents' names, and a cache on that
        content.update(small[name].tobytes())
    about = {
        "schema": SCHEMA,
        "digest": content.hexdigest(),
        "tokenizer": tokenizer,
        "settings": settings.lasting(),
        "domains": domains,
    }
    publish_json(folder / "rows.json", about)


def _save(path: Path, values: Sequence[int] | np.ndarray) -> None:
    with path.open("wb") as file:
        np.save(file, np.asarray(values))
