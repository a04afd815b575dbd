"""Documents -> rows of token ids with masks, in this process or in several; the rows do not depend on their number.

Knows windows, the length of a row and reasons to drop one. Does not know sources, caps or files.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from draftsmith.data.chat import Rendered, UnusableError, cut, everything, given, render
from draftsmith.data.corpus import DataSettings
from draftsmith.data.documents import Document, Documents
from draftsmith.errors import UserError

CHUNK_DOCUMENTS, CHUNK_BYTES = 64, 1 << 20  # of what one process tokenises at once
POOLED = 4000  # documents from which on several processes are worth their start


@dataclass
class Tokenised:
    """A document's rows, and a reason for each that was dropped. `together`: they share prefixes and stay neighbours."""

    name: str
    rows: list[Rendered] = field(default_factory=list)
    drops: list[str] = field(default_factory=list)
    together: bool = False


Chunks = Iterable[list[Document]]
Tokenise = Callable[[Chunks], Iterator[Tokenised]]


class Tokeniser:
    """What turns documents into rows: a tokenizer, the length of a row, and which of its tokens are supervised."""

    def __init__(self, tokenizer: Any, settings: DataSettings) -> None:
        self.tokenizer, self.settings = tokenizer, settings
        self.max_length = settings.max_length
        self.vocabulary = len(tokenizer)

    def __call__(self, documents: Sequence[Document]) -> list[Tokenised]:
        """The rows of each document, in their order."""
        texts = [document.text for document in documents if document.text is not None]
        encoded = iter(self.tokenizer(texts, verbose=False)["input_ids"] if texts else ())
        return [self._document(document, encoded) for document in documents]

    def _document(self, document: Document, encoded: Iterator[list[int]]) -> Tokenised:
        done = Tokenised(document.name, together=document.messages is not None)
        try:
            pieces = self._pieces(document, encoded)
        except UnusableError as reason:
            done.drops.append(str(reason))
            return done
        for piece in pieces:
            try:
                if len(piece.token_ids) < 2:
                    raise UnusableError("fewer than two tokens")
                done.rows.append(cut(piece, self.max_length))
            except UnusableError as reason:
                done.drops.append(str(reason))
        return done

    def _pieces(self, document: Document, encoded: Iterator[list[int]]) -> list[Rendered]:
        if document.text is not None:
            return windows(next(encoded), self.tokenizer, self.max_length)
        if document.messages is not None:
            options = self.settings.model_dump(include={"turns", "train_on", "reasoning"})
            return render(document.messages, self.tokenizer, document.tools, **options)
        ids = np.asarray(document.token_ids, dtype=np.int32)
        if len(ids) and ids.max() >= self.vocabulary:
            raise UnusableError("token id outside the vocabulary")
        if self.settings.reasoning == "drop":
            raise UserError(
                f"data.reasoning: drop cannot find the reasoning in the token ids of {document.name}; set keep"
            )
        return [given(ids, document.supervised or (), self.settings.turns, self.settings.train_on)]


def windows(ids: list[int], tokenizer: Any, max_length: int) -> list[Rendered]:
    """A text's tokens in windows of at most `max_length`, each begun as the tokenizer begins a text (with BOS or not).

    The last is ended by EOS. Every token but the first of a window is supervised.
    """
    begin = ids[:1] if ids[:1] == [tokenizer.bos_token_id] else []
    body = list(ids[len(begin) :])
    if not body:
        return [everything(begin)]
    if tokenizer.eos_token_id is not None and body[-1] != tokenizer.eos_token_id:
        body.append(tokenizer.eos_token_id)
    room = max_length - len(begin)
    return [everything(begin + body[first : first + room]) for first in range(0, len(body), room)]


def chunks(documents: Documents, chosen: Iterable[int]) -> Iterator[list[Document]]:
    """The chosen documents in their order, in lists of bounded number and size; a larger document is alone in its list."""
    some: list[Document] = []
    size = 0
    for index in chosen:
        if some and (len(some) == CHUNK_DOCUMENTS or size + documents.size(index) > CHUNK_BYTES):
            yield some
            some, size = [], 0
        some.append(documents[index])
        size += documents.size(index)
    if some:
        yield some


@contextmanager
def tokenising(tokeniser: Tokeniser, documents: int, workers: int) -> Iterator[Tokenise]:
    """A function from chunks of documents to the rows of each document, in their order.

    workers: processes, 0 for one a core; few documents are tokenised in this process. Raises `UserError` where one dies.
    """
    count = workers or _cores()
    if count == 1 or documents < POOLED:
        yield lambda parts: (done for part in parts for done in tokeniser(part))
        return
    try:
        with ProcessPoolExecutor(count, initializer=_start, initargs=(tokeniser,)) as pool:
            pool.submit(os.getpid).result()  # they start now, before a progress bar has a thread that a fork would lose
            yield lambda parts: _in_order(pool, parts, 2 * count)
    except BrokenProcessPool as error:
        raise UserError(
            "data.workers: a process that tokenised died, perhaps for memory; set data.workers=1"
        ) from error


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_order(pool: ProcessPoolExecutor, parts: Chunks, ahead: int) -> Iterator[Tokenised]:
    """Results in the order of `parts`, of which at most `ahead` are under way: memory does not grow with their number."""
    waiting: deque[Future[list[Tokenised]]] = deque()
    try:
        for part in parts:
            waiting.append(pool.submit(_work, part))
            if len(waiting) == ahead:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


_worker: Tokeniser | None = (
    None  # in a process of the pool: set once, so that the tokenizer does not travel with each part
)


def _start(tokeniser: Tokeniser) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker = tokeniser


def _work(part: list[Document]) -> list[Tokenised]:
    assert _worker is not None
    return _worker(part)
