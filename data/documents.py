"""Documents between reading and tokenising: a file on disk that only this process sees, and a few bytes of memory for each.

Knows how a document is kept and found again. Does not know where it comes from or what becomes of it.
"""

import json
import os
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Message = dict[
    str, Any
]  # role, content, and whatever else its chat template reads: tool_calls, reasoning_content, name
GROUP = (
    "draftsmith_group"  # a JSON row's field that keeps several rows on one side of the split; `regenerate` writes it
)
TRAIN, HELD_OUT = SPLITS = ("train", "held_out")


class Document(NamedTuple):
    """A text, a conversation (with the JSON schemas of its tools), or token ids with their mask: one of the three is set.

    `group` decides the split: documents of one group (one file) always fall on the same side.
    """

    name: str
    domain: str
    group: str
    text: str | None = None
    messages: list[Message] | None = None
    tools: list[Any] | None = None
    token_ids: list[int] | None = None
    supervised: list[bool] | None = None

    def content(self) -> str:
        """What makes two documents exact duplicates."""
        if self.text is not None:
            return self.text
        return json.dumps([self.messages, self.tools, self.token_ids, self.supervised], ensure_ascii=False)


class Documents:
    """Documents in the order of reading, found by index. What was not kept is counted in `drops` by reason, and `first`
    has a line on the first of each reason that names its place."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: where the unnamed file lies (default: the system's folder of temporary files); it goes with the process."""
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (lives as long as the object)
        self._offsets = array("Q", [0])
        self._domain_of = array("H")
        self.domains: list[str] = []  # in the order of appearance
        self.splits = np.zeros(0, dtype=np.uint8)  # index into SPLITS
        self.read = 0
        self.drops: Counter[str] = Counter()
        self.first: dict[str, str] = {}

    def append(self, document: Document) -> None:
        """Keep a document. Raises UnicodeEncodeError where its text has half a surrogate pair."""
        kept = json.dumps([*document[:2], "", *document[3:]], ensure_ascii=False).encode()
        if document.domain not in self.domains:
            self.domains.append(document.domain)
        self._file.write(kept)
        self._offsets.append(self._offsets[-1] + len(kept))
        self._domain_of.append(self.domains.index(document.domain))

    def drop(self, reason: str, line: str = "") -> None:
        """Count a row or document that is not kept."""
        self.drops[reason] += 1
        if line:
            self.first.setdefault(reason, line)

    def close(self, splits: Sequence[int] | np.ndarray) -> None:
        """End the writing. splits: the side of each document, as index into SPLITS."""
        self._file.flush()
        self.splits = np.asarray(splits, dtype=np.uint8)

    def __len__(self) -> int:
        return len(self._domain_of)

    def __getitem__(self, index: int) -> Document:
        start = self._offsets[index]
        return Document(*json.loads(os.pread(self._file.fileno(), self._offsets[index + 1] - start, start)))

    def __iter__(self) -> Iterator[Document]:
        return (self[index] for index in range(len(self)))

    def size(self, index: int) -> int:
        """Bytes of a document on disk, without reading it."""
        return self._offsets[index + 1] - self._offsets[index]

    def indices(self, split: str) -> np.ndarray:
        """Indices of the documents of one split."""
        return np.flatnonzero(self.splits == SPLITS.index(split))

    def by_domain(self, split: str) -> dict[str, np.ndarray]:
        """Indices of the documents of one split, by domain in alphabetical order."""
        indices = self.indices(split)
        domain_of = np.asarray(self._domain_of)[indices]
        found = {domain: indices[domain_of == self.domains.index(domain)] for domain in sorted(self.domains)}
        return {domain: chosen for domain, chosen in found.items() if len(chosen)}

    def summary(self) -> dict[str, Any]:
        """Rows read, documents kept, drops by reason, and the first place of each."""
        drops = dict(sorted(self.drops.items()))
        return {"read": self.read, "kept": len(self), "drops": drops, "first": dict(sorted(self.first.items()))}
