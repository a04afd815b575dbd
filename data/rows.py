"""Token rows with loss masks on disk: written once by `prepare`, read memory-mapped by every later stage.

Knows the files of a row folder, windows and caps. Does not know where text comes from, targets or caches.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tokenize import TokenError  # NumPy reads the head of an array with Python's own tokenizer
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from draftsmith.data.chat import Rendered, UnusableError, cut, render
from draftsmith.data.corpus import DataSettings, load_documents
from draftsmith.data.tokenizer import tokenizer_digest
from draftsmith.errors import UserError
from draftsmith.files import publish, publish_json
from draftsmith.progress import ticker

if TYPE_CHECKING:
    from datasets import Dataset

SCHEMA = 1
SPLITS = ("train", "held_out")
TEXTS_AT_ONCE = 64


class Row(NamedTuple):
    """token_ids: int32 [T]; supervised: bool [T], true where token t is trained as a predicted token (never t = 0)."""

    token_ids: np.ndarray
    supervised: np.ndarray
    domain: str
    document: str


def prepare(settings: DataSettings, tokenizer: Any, folder: Path, documents: "Dataset | None" = None) -> dict[str, Any]:
    """Write the rows of both splits into `folder` and return what was written and dropped, per split and domain.

    `documents` saves reading the sources again where the caller has them (see `load_documents`).
    Raises `UserError` when a split holds no supervised token.
    """
    if documents is None:
        documents = load_documents(settings)
    summary: dict[str, Any] = {"tokenizer": tokenizer_digest(tokenizer)}
    for split in SPLITS:
        chosen, tallies = _choose(documents, split, settings, tokenizer)
        summary[split] = _summary(tallies)
        if not chosen:
            raise UserError(
                f"data: no supervised token in the {split} split (dropped: {summary[split]['drops'] or 'nothing'});"
                " give rows with answers, or raise max_length"
            )
        # A cache or a training run may take only the first rows: their mixture must be that of the whole.
        order = np.random.default_rng([settings.seed, SPLITS.index(split)]).permutation(len(chosen))
        write_rows([chosen[index] for index in order], Path(folder) / split, settings, summary["tokenizer"])
    publish_json(Path(folder) / "summary.json", summary)
    return summary


class Rows(Sequence[Row]):
    """The rows of one split. Nothing is read before it is asked for."""

    def __init__(self, folder: Path) -> None:
        """Use `Rows.open`."""
        self.folder = folder
        about = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
        self.domains: list[str] = about["domains"]  # the distinct names
        self.digest: str = about["digest"]  # of ids, masks, windows and domains
        self.tokenizer: str = about["tokenizer"]
        self.settings: dict[str, Any] = about["settings"]
        self._documents: list[str] = about["documents"]
        self._ids = np.load(folder / "token_ids.npy", mmap_mode="r")
        self._supervised = np.load(folder / "supervised.npy", mmap_mode="r")
        self.offsets: np.ndarray = np.load(folder / "offsets.npy")
        self._domain_of: np.ndarray = np.load(folder / "domain_of.npy")
        self._document_of: np.ndarray = np.load(folder / "document_of.npy")

    @classmethod
    def open(cls, folder: Path, split: str) -> "Rows":
        """The rows that `prepare` wrote. Raises `UserError` when there are none."""
        place = Path(folder) / split
        if not (place / "rows.json").is_file():
            raise UserError(f"{place}: no prepared rows; run `draftsmith prepare` first")
        try:
            rows = cls(place)
        except (OSError, ValueError, KeyError, TypeError, EOFError, RecursionError, SyntaxError, TokenError) as error:
            reason = str(error).split("\n")[0]
            raise UserError(f"{place}: damaged rows ({reason}); run `draftsmith prepare` again") from error
        if damage := rows._misfit():
            raise UserError(f"{place}: damaged rows ({damage}); run `draftsmith prepare` again")
        return rows

    def _misfit(self) -> str:
        """What does not fit together among the arrays, "" where all does."""
        if any(array.ndim != 1 for array in (self._ids, self._supervised, self.offsets)) or not len(self.offsets):
            return "an array is not a list of numbers"
        if len(self._ids) != len(self._supervised) or self.offsets[0] != 0 or self.offsets[-1] != len(self._ids):
            return "ids, masks and offsets have other lengths"
        if (np.diff(self.offsets) < 0).any() or not len(self._domain_of) == len(self._document_of) == len(
            self.offsets
        ) - 1:
            return "offsets are not those of the rows"
        for numbers, names in ((self._domain_of, self.domains), (self._document_of, self._documents)):
            if not isinstance(names, list) or (len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(names)):
                return "a domain or document is not in the list of names"
        return ""

    def __len__(self) -> int:
        return len(self._domain_of)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        span = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        document = self._documents[self._document_of[index]]
        return Row(np.array(self._ids[span]), np.array(self._supervised[span]), self.domain(index), document)

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

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


@dataclass
class _Tally:
    """Counts of one domain in one split."""

    rows: int = 0
    tokens: int = 0
    supervised: int = 0
    drops: Counter[str] = field(default_factory=Counter)

    def add(self, row: Row) -> None:
        self.rows += 1
        self.tokens += len(row.token_ids)
        self.supervised += int(row.supervised.sum())

    def counts(self) -> dict[str, Any]:
        share = self.supervised / max(self.tokens, 1)
        return {
            "rows": self.rows,
            "tokens": self.tokens,
            "supervised_share": share,
            "drops": dict(sorted(self.drops.items())),
        }


def _summary(tallies: dict[str, _Tally]) -> dict[str, Any]:
    whole = _Tally()
    for tally in tallies.values():
        whole.rows += tally.rows
        whole.tokens += tally.tokens
        whole.supervised += tally.supervised
        whole.drops.update(tally.drops)
    return whole.counts() | {"domains": {domain: tally.counts() for domain, tally in sorted(tallies.items())}}


def _choose(
    documents: "Dataset", split: str, settings: DataSettings, tokenizer: Any
) -> tuple[list[Row], dict[str, _Tally]]:
    """Rows of one split: documents in a seeded order, until the domain's cap on tokens is reached."""
    caps = settings.train_tokens if split == "train" else settings.held_out_tokens
    splits, domains = np.asarray(documents["split"]), np.asarray(documents["domain"])
    rows: list[Row] = []
    tallies = {domain: _Tally() for domain in sorted(set(domains[splits == split]))}
    for number, (domain, tally) in enumerate(tallies.items()):
        cap = caps.get(domain)
        chosen = np.flatnonzero((splits == split) & (domains == domain))
        np.random.default_rng([settings.seed, number]).shuffle(chosen)
        with ticker(f"prepare {split}/{domain}", len(chosen), "documents") as progress:
            for first in range(0, len(chosen), TEXTS_AT_ONCE):
                some = documents.select(chosen[first : first + TEXTS_AT_ONCE])
                for row in _tokenise(some, tokenizer, settings.max_length, tally):
                    if cap is not None and tally.tokens + len(row.token_ids) > cap:
                        break
                    tally.add(row)
                    rows.append(row)
                else:
                    progress.advance(len(some))
                    continue
                break
    return rows, {str(domain): tally for domain, tally in tallies.items()}


def _tokenise(documents: "Dataset", tokenizer: Any, max_length: int, tally: _Tally) -> Iterator[Row]:
    """The rows of some documents in their order; what cannot be used is counted in `tally.drops`."""
    plain = [document["text"] for document in documents if document["text"] is not None]
    encoded = iter(tokenizer(plain, verbose=False)["input_ids"] if plain else ())
    for document in documents:
        for piece in _pieces(document, encoded, tokenizer, max_length, tally):
            yield Row(piece.token_ids, piece.supervised, document["domain"], document["document"])


def _pieces(
    document: Any, encoded: Iterator[list[int]], tokenizer: Any, max_length: int, tally: _Tally
) -> Iterator[Rendered]:
    try:
        if document["text"] is not None:
            whole = windows(next(encoded), tokenizer, max_length)
        else:
            whole = render(document["messages"], tokenizer)
    except UnusableError as reason:
        tally.drops[str(reason)] += 1
        return
    for piece in whole:
        if len(piece.token_ids) < 2:
            tally.drops["fewer than two tokens"] += 1
            continue
        try:
            yield cut(piece, max_length)
        except UnusableError as reason:
            tally.drops[str(reason)] += 1


def windows(ids: list[int], tokenizer: Any, max_length: int) -> list[Rendered]:
    """A text's tokens in windows of at most `max_length`, each begun as the tokenizer begins a text (with BOS or not).

    The last is ended by EOS. Every token but the first of a window is supervised.
    """
    begin = ids[:1] if ids[:1] == [tokenizer.bos_token_id] else []
    body = list(ids[len(begin) :])
    if not body:
        return [_window(begin)]
    if tokenizer.eos_token_id is not None and body[-1] != tokenizer.eos_token_id:
        body.append(tokenizer.eos_token_id)
    room = max_length - len(begin)
    return [_window(begin + body[first : first + room]) for first in range(0, len(body), room)]


def _window(ids: list[int]) -> Rendered:
    supervised = np.ones(len(ids), dtype=bool)
    supervised[:1] = False
    return Rendered(np.asarray(ids, dtype=np.int32), supervised)


def write_rows(rows: list[Row], folder: Path, settings: DataSettings, tokenizer: str) -> None:
    """Write one split. `tokenizer` is its digest. `rows.json` comes last: a folder without it is not prepared."""
    (folder / "rows.json").unlink(missing_ok=True)
    domains = sorted({row.domain for row in rows})
    documents = sorted({row.document for row in rows})
    document_of = {name: index for index, name in enumerate(documents)}
    arrays = {
        "token_ids": np.concatenate([row.token_ids for row in rows]),
        "supervised": np.concatenate([row.supervised for row in rows]),
        "offsets": np.cumsum([0, *(len(row.token_ids) for row in rows)], dtype=np.int64),
        "domain_of": np.asarray([domains.index(row.domain) for row in rows], dtype=np.uint8),
        "document_of": np.asarray([document_of[row.document] for row in rows], dtype=np.uint32),
    }
    content = xxhash.xxh3_128(json.dumps(domains).encode())
    for name, array in arrays.items():
        content.update(np.ascontiguousarray(array).data)
        publish(folder / f"{name}.npy", lambda path, array=array: _save(path, array))  # type: ignore[misc]
    about = {
        "schema": SCHEMA,
        "digest": content.hexdigest(),
        "tokenizer": tokenizer,
        "settings": settings.model_dump(mode="json"),
        "domains": domains,
        "documents": documents,
    }
    publish_json(folder / "rows.json", about)


def _save(path: Path, array: np.ndarray) -> None:
    with path.open("wb") as file:
        np.save(file, array)
