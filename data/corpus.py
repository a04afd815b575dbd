"""What is prepared: the settings of the data, and all documents of all sources, without duplicates, each on its side.

Knows sources, duplicates and the held-out split. Does not know formats, tokenizers, templates or lengths.
"""

import hashlib
from array import array
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from draftsmith.data.documents import HELD_OUT, SPLITS, TRAIN, Documents
from draftsmith.data.seen import Seen
from draftsmith.data.sources import read_source
from draftsmith.errors import UserError
from draftsmith.settings import SEEDS, Settings


class Source(Settings):
    """One origin of documents.

    `python`: the text of the running Python installation in the domains code, prose and chat; no path.
    `json`, `parquet`, `text`: a file of that kind, or a folder of them. `hub`: a name for `datasets.load_dataset`, with
    its configuration, split and revision; streaming reads the rows over the network as they are needed.
    """

    kind: Literal["python", "json", "parquet", "text", "hub"] = "python"
    path: str | None = None
    domain: str | None = None  # of all its documents; None: "chat" for conversations, "prose" for text
    domains: tuple[str, ...] = ("code", "prose", "chat")  # of kind "python" only
    # Of kind "hub" only.
    split: str = "train"
    config: str | None = None
    revision: str | None = None
    streaming: bool = False

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.kind != "python" and not self.path:
            raise ValueError(f"a source of kind {self.kind!r} needs a path")
        if unknown := set(self.domains) - {"code", "prose", "chat"}:
            raise ValueError(f"unknown domain {sorted(unknown)[0]!r}; the embedded corpus has code, prose, chat")
        ignored: tuple[str, ...] = ("path", "domain") if self.kind == "python" else ("domains",)
        ignored += () if self.kind == "hub" else ("split", "config", "revision", "streaming")
        for name in ignored:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} means nothing to a source of kind {self.kind!r}; remove it")
        return self

    def possible_domains(self) -> tuple[str, ...]:
        """The domains that its documents may have."""
        if self.kind == "python":
            return self.domains
        return (self.domain,) if self.domain else ("prose",) if self.kind == "text" else ("chat", "prose")


class DataSettings(Settings):
    """What is prepared.

    sources: where documents come from; max_length: of a row, in tokens; held_out: share of the documents; train_tokens,
    held_out_tokens: cap on the tokens of a domain; a domain without a cap is taken whole. seed: of the order in which documents
    are taken and rows stand. workers: processes that tokenise, 0 for one a core; the rows do not depend on it.
    """

    sources: tuple[Source, ...] = (Source(),)
    max_length: int = Field(512, ge=2)
    held_out: float = Field(0.05, gt=0.0, lt=1.0)
    train_tokens: dict[str, PositiveInt] = Field(default_factory=dict)
    held_out_tokens: dict[str, PositiveInt] = Field(default_factory=dict)
    seed: int = Field(0, ge=0, lt=SEEDS)
    turns: Literal["all", "last"] = "all"  # of a conversation: supervise every answer, or the last alone
    train_on: Literal["answers", "text"] = "answers"  # text: every token but the first is supervised
    reasoning: Literal["keep", "drop"] = "keep"  # drop: reasoning is taken out of the messages before rendering
    workers: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _caps_of_known_domains(self) -> Self:
        known = {domain for source in self.sources for domain in source.possible_domains()}
        for name, caps in (("train_tokens", self.train_tokens), ("held_out_tokens", self.held_out_tokens)):
            if unknown := sorted(set(caps) - known):
                have = ", ".join(sorted(known)) or "none"
                raise ValueError(f"{name}: no source has the domain {unknown[0]!r} (there are: {have}); correct it")
        return self

    def lasting(self) -> dict[str, Any]:
        """The settings that rows depend on, as JSON."""
        return self.model_dump(mode="json", exclude={"workers"})


def load_documents(settings: DataSettings, folder: Path | None = None) -> Documents:
    """All documents of all sources without exact duplicates, in an order that depends on the sources alone.

    They lie in an unnamed file in `folder` while the process lives. Raises `UserError` for a missing file, a file without
    a usable row, or when nothing is left to train on.
    """
    documents = Documents(folder)
    seen = Seen()
    sides = [_append_source(source, documents, seen, settings.held_out) for source in settings.sources]
    if not len(documents):
        raise UserError(f"data.sources: no documents in {_names(settings)}; give a source that has text")
    documents.close(np.concatenate(sides))
    for split in SPLITS:
        if not len(documents.indices(split)):
            raise UserError(
                f"data.sources: no {split} documents among {len(documents)} of {_names(settings)}; give more documents"
            )
    return documents


def share(group: str) -> float:
    """A fixed number in [0, 1) for a name, the same on every machine."""
    return int.from_bytes(hashlib.sha256(group.encode()).digest()[:8], "big") / 2**64


def _append_source(source: Source, documents: Documents, seen: Seen, held_out: float) -> np.ndarray:
    """Append the documents of a source that were not seen before. Returns the side of each, uint8 [documents]."""
    shares = array("d")
    for document in read_source(source, documents):
        if not seen.add(document.content().encode()):
            documents.drop("duplicate document")
            continue
        documents.append(document)
        shares.append(share(document.group))
    return _sides(np.asarray(shares), held_out)


def _sides(shares: np.ndarray, held_out: float) -> np.ndarray:
    """The side of each document. The group of the smallest hash is always held out, so that few documents suffice."""
    outside = shares < held_out
    if len(np.unique(shares)) > 1:
        outside |= shares == shares.min()
    return np.where(outside, SPLITS.index(HELD_OUT), SPLITS.index(TRAIN)).astype(np.uint8)


def _names(settings: DataSettings) -> str:
    return ", ".join(source.path or source.kind for source in settings.sources) or "an empty list of sources"
