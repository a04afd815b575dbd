"""The stage `prepare`: documents become rows, in a seeded order, up to the caps, and every drop is counted.

Knows splits, caps, duplicates among rows, and order. Does not know formats or templates. Memory: some twenty bytes a row.
"""

import shutil
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.data.contamination import repeated_prompts
from draftsmith.data.corpus import DataSettings, load_documents
from draftsmith.data.documents import HELD_OUT, SPLITS, TRAIN, Documents
from draftsmith.data.rows import Row, Rows, write_rows
from draftsmith.data.seen import Seen
from draftsmith.data.tokenise import Tokenise, Tokeniser, chunks, tokenising
from draftsmith.data.tokenizer import tokenizer_digest
from draftsmith.errors import UserError
from draftsmith.files import publish_json
from draftsmith.progress import ticker

SPOOL = "spool"  # rows in the order of choice, until they are written in their final order


@dataclass
class _Tally:
    """Counts of one domain in one split."""

    rows: int = 0
    tokens: int = 0
    supervised: int = 0
    drops: Counter[str] = field(default_factory=Counter)
    masks: Counter[str] = field(default_factory=Counter)  # rows by where their mask comes from (see `Rendered.how`)

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
            "masks": dict(sorted(self.masks.items())),
        }


def prepare(settings: DataSettings, tokenizer: Any, folder: Path, documents: Documents | None = None) -> dict[str, Any]:
    """Write the rows of both splits into `folder` and return what was written and dropped, per split and domain.

    `documents` saves reading the sources again where the caller has them (see `load_documents`).
    Raises `UserError` when a split holds no supervised token.
    """
    folder = Path(folder)
    if documents is None:
        documents = load_documents(settings, folder)
    summary: dict[str, Any] = {"tokenizer": tokenizer_digest(tokenizer), "documents": documents.summary()}
    seen = Seen()
    with tokenising(Tokeniser(tokenizer, settings), len(documents), settings.workers) as tokenise:
        for split in SPLITS:
            chosen = _Choice(documents, split, settings, tokenise, seen)
            spool = folder / SPOOL
            shutil.rmtree(spool, ignore_errors=True)  # of a run that was killed
            write_rows(chosen.rows(), spool, settings, summary["tokenizer"])
            summary[split] = chosen.summary()
            if not chosen.units:
                raise UserError(
                    f"data: no supervised token in the {split} split (dropped: {summary[split]['drops'] or 'nothing'});"
                    f" give rows with answers, or raise max_length{_or_caps(chosen.caps)}"
                )
            # A cache or a training run may take only the first rows: their mixture must be that of the whole.
            rng = np.random.default_rng([settings.seed, SPLITS.index(split)])
            order = shuffled(np.frombuffer(chosen.units, dtype=np.uint64), rng)
            write_rows(Rows(spool).read(order), folder / split, settings, summary["tokenizer"])
            shutil.rmtree(spool)
    summary["contamination"] = repeated_prompts(Rows.open(folder, TRAIN), Rows.open(folder, HELD_OUT))
    publish_json(folder / "summary.json", summary)
    return summary


def _or_caps(caps: dict[str, int]) -> str:
    return f" or the caps on tokens ({', '.join(sorted(caps))})" if caps else ""


def shuffled(units: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """int64 [rows]: indices of the rows in a random order in which the rows of one unit stay neighbours, as they were.

    units: int [rows], not falling, each number from 0 to the last.
    """
    order = rng.permutation(int(units[-1]) + 1)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return np.argsort(rank[units], kind="stable")


class _Choice:
    """The rows of one split: documents in a seeded order, until the domain's cap on tokens is reached."""

    def __init__(
        self, documents: Documents, split: str, settings: DataSettings, tokenise: Tokenise, seen: Seen
    ) -> None:
        self.documents, self.split, self.settings, self.tokenise = documents, split, settings, tokenise
        self.seen = seen  # rows that are in this or an earlier split
        self.caps = settings.train_tokens if split == TRAIN else settings.held_out_tokens
        self.units = array("Q")  # of each row: rows of one unit stay neighbours
        self.tallies: dict[str, _Tally] = {}

    def rows(self) -> Iterator[Row]:
        """The rows, once; `units` and the counts grow with them."""
        for number, (domain, chosen) in enumerate(self.documents.by_domain(self.split).items()):
            tally = self.tallies[domain] = _Tally()
            np.random.default_rng([self.settings.seed, number]).shuffle(chosen)
            with ticker(f"prepare {self.split}/{domain}", len(chosen), "documents") as progress:
                for row in self._domain(domain, chosen, tally, progress.advance):
                    tally.add(row)
                    yield row

    def _domain(self, domain: str, chosen: np.ndarray, tally: _Tally, advance: Any) -> Iterator[Row]:
        cap = self.caps.get(domain)
        for done in self.tokenise(chunks(self.documents, map(int, chosen))):
            tally.drops.update(done.drops)
            unit = self._next_unit()
            for piece in done.rows:
                row = Row(piece.token_ids, piece.supervised, domain, done.name)
                if not self.seen.add(row.token_ids.tobytes(), row.supervised.tobytes()):
                    tally.drops["duplicate row"] += 1
                    continue
                if cap is not None and tally.tokens + len(row.token_ids) > cap:
                    return
                self.units.append(unit if done.together else self._next_unit())
                tally.masks[piece.how] += 1
                yield row
            advance(1)

    def _next_unit(self) -> int:
        return self.units[-1] + 1 if self.units else 0

    def summary(self) -> dict[str, Any]:
        """Counts of the whole split and of each domain."""
        whole = _Tally()
        for tally in self.tallies.values():
            whole.rows += tally.rows
            whole.tokens += tally.tokens
            whole.supervised += tally.supervised
            whole.drops.update(tally.drops)
            whole.masks.update(tally.masks)
        return whole.counts() | {"domains": {domain: tally.counts() for domain, tally in sorted(self.tallies.items())}}
