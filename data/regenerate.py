"""Answers written by the target itself: which turns are asked for, the journal of what is done, and the exact account of it.

Knows conversations, files and counts. Does not know how an answer comes about (`draftsmith.data.answer`) or where the
conversations come from.

    answers.jsonl   one line per answered conversation, appended as it is done; a line cut short by a crash is done again
    rows.jsonl      the training rows made of them, in the order of the input: a `json` source for `prepare`
    settings.json   what the answers depend on; another value is refused
    summary.json    ok + failed + skipped = input, with the reasons
"""

import fcntl
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from draftsmith.data.chat import Messages, Tools, UnusableError, check_order
from draftsmith.data.documents import GROUP
from draftsmith.errors import UserError
from draftsmith.files import digest, publish, publish_json
from draftsmith.progress import Ticker
from draftsmith.settings import SEEDS, Settings

VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
IN_A_ROW = 20  # failures without one answer between them after which the server is taken to be out of order


class RegenerateSettings(Settings):
    """Who answers, and how. Without `base_url` the target does, in this process.

    base_url: of an OpenAI-compatible server, such as http://localhost:8000/v1; model: its name there. api_key_env: the
    environment variable that holds the key. concurrency: conversations under way at once (locally: rows of a batch).
    token_ids: ask the server for the ids that it read and generated (`return_token_ids`, as vLLM knows it). temperature (0: greedy)
    and top_p: how answers are sampled; max_new_tokens: of one answer; seed: of the sampling, here and where a server heeds it.
    timeout: seconds for one answer of a server; retries: of one request, after 429, 5xx, timeouts and lost connections.
    """

    base_url: str | None = None
    model: str | None = None
    api_key_env: str | None = None
    token_ids: bool = True
    temperature: float = Field(0.0, ge=0.0, le=10.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    max_new_tokens: int = Field(512, ge=1)
    seed: int = Field(0, ge=0, lt=SEEDS)
    concurrency: int = Field(32, ge=1)
    timeout: float = Field(600.0, gt=0.0)
    retries: int = Field(6, ge=0)

    @model_validator(mode="after")
    def _server_or_none(self) -> Self:
        if self.base_url is None:
            for name in ("model", "api_key_env", "token_ids", "timeout", "retries"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} is of a server; give its base_url, or remove {name}")
            return self
        address = urlsplit(self.base_url)
        if address.scheme not in ("http", "https") or not address.hostname or address.username or address.query:
            raise ValueError("base_url must be http(s)://host[:port]/path, without user, password or query")
        if not self.model:
            raise ValueError("base_url needs model, the name under which the server knows the target")
        if self.api_key_env is not None and not VARIABLE.fullmatch(self.api_key_env):
            raise ValueError("api_key_env is the name of an environment variable, never the key itself")
        return self

    def identity(self) -> dict[str, Any]:
        """What the answers depend on. The address of the server, speed and patience are not of it."""
        chosen = {"model", "temperature", "top_p", "max_new_tokens", "seed", "token_ids"}
        return {"by": "target" if self.base_url is None else "server"} | self.model_dump(mode="json", include=chosen)


class Conversation(NamedTuple):
    """The source's messages; None for a document that is no conversation."""

    messages: Messages | None
    tools: Tools = None


class Turn(NamedTuple):
    """One answer. prompt_ids and token_ids: what was read and what was generated, end of turn included; None where unknown."""

    message: dict[str, Any]
    prompt_ids: list[int] | None
    token_ids: list[int] | None
    finish: str


class Outcome(NamedTuple):
    """kind: ok, failed (to be tried again) or skipped (nothing can be asked), with the reason; record: the journal's line."""

    kind: str
    reason: str = ""
    record: dict[str, Any] | None = None


class AnswerError(Exception):
    """No answer could be had. The message is the reason, under which conversations are counted."""


class RefusedError(AnswerError):
    """A request that its receiver will never answer, such as one beyond the context."""


@dataclass
class Dialogue:
    """A conversation in the course of being answered, turn after turn in the context of the answers before.

    Asked for are the assistant's turns of text, and an answer to a last question without one. A tool call stays as it is in
    the source, unsupervised context: the result behind it answers this very call.
    """

    id: str
    messages: list[dict[str, Any]]
    tools: Tools
    history: list[dict[str, Any]] = field(default_factory=list)
    rows: list[tuple[list[int], list[int]]] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)
    ended: str = ""  # why it ends before the source does
    _place: int = 0
    _ids_known: bool = True

    def asked(self) -> list[dict[str, Any]] | None:
        """The messages that wait for an answer; None when there is nothing left to ask."""
        while self._place < len(self.messages):
            message = self.messages[self._place]
            if message["role"] == "assistant" and not message.get("tool_calls"):
                return self.history
            self.history.append(message)
            self._place += 1
        return self.history if not self.ended and self.history[-1]["role"] in ("user", "tool") else None

    def take(self, turn: Turn) -> None:
        """Go on with this answer."""
        self.finishes.append(turn.finish)
        self.history.append(turn.message)
        self._place += 1
        if turn.message.get("tool_calls"):
            self.stop("the answer calls a tool")
        if turn.prompt_ids is None or turn.token_ids is None:
            self._ids_known = False
            return
        if not self.rows or turn.prompt_ids[: len(self.rows[-1][0])] != self.rows[-1][0]:
            self.rows.append(([], []))
        ids, mask = self.rows[-1]
        mask += [0] * (len(turn.prompt_ids) - len(ids)) + [1] * len(turn.token_ids)
        ids[:] = turn.prompt_ids + turn.token_ids

    def stop(self, reason: str) -> None:
        """End here: what follows in the source is left out."""
        self.ended, self._place = reason, len(self.messages)

    def fail(self, error: AnswerError | UnusableError) -> Outcome:
        """What an error means: the answers so far, where the next question alone cannot be put; else nothing is kept."""
        if self.finishes and not (isinstance(error, AnswerError) and not isinstance(error, RefusedError)):
            while self.history[-1]["role"] != "assistant":
                self.history.pop()
            self.stop(str(error))
            return self.outcome()
        return Outcome("skipped" if isinstance(error, UnusableError) else "failed", str(error))

    def outcome(self) -> Outcome:
        """The finished conversation."""
        kept_calls = any(message.get("tool_calls") for message in self.messages)
        if kept_calls and not self._ids_known:
            return Outcome(
                "skipped", "calls tools, and the server returns no token ids that would tell whose turn is whose"
            )
        rows = [{"token_ids": ids, "loss_mask": mask} for ids, mask in self.rows] if self._ids_known else None
        about = {"messages": self.history, "tools": self.tools, "rows": rows, "finish": self.finishes}
        return Outcome("ok", record={"id": self.id, **about, "ended": self.ended})


class Engine(Protocol):
    """Who answers: see `draftsmith.data.answer`."""

    def answer(self, dialogues: Iterator[Dialogue]) -> Iterator[Outcome]:
        """An outcome for every dialogue, in any order; as many are under way as its settings say."""
        ...


def open_dialogue(conversation: Conversation) -> Dialogue:
    """Raises `UnusableError` with the reason where there is nothing to ask."""
    if conversation.messages is None:
        raise UnusableError("not a conversation")
    messages = [dict(message) for message in conversation.messages]
    if any(message.get("content") is None and not message.get("tool_calls") for message in messages):
        raise UnusableError("null content")
    if not any(message["role"] == "user" for message in messages):
        raise UnusableError("no question")
    check_order(messages)
    dialogue = Dialogue(digest([messages, conversation.tools]), messages, conversation.tools)
    if dialogue.asked() is None:
        raise UnusableError("nothing to answer beside tool calls")
    return dialogue


def regenerate(
    conversations: Iterable[Conversation], engine: Engine, identity: Mapping[str, Any], folder: Path, progress: Ticker
) -> dict[str, Any]:
    """Answer what is not answered yet and write `rows.jsonl`; returns the account, which is also `summary.json`.

    identity: what the answers depend on, `RegenerateSettings.identity` and the target. Raises `UserError` where the folder's
    answers depend on something else, where nobody answers, and where another process writes.
    """
    with Journal(folder, identity) as journal:
        account = _Account(journal, progress)
        failed_in_a_row = 0
        for outcome in engine.answer(account.open(conversations)):
            account.add(outcome)
            failed_in_a_row = failed_in_a_row + 1 if outcome.kind == "failed" else 0
            if failed_in_a_row >= IN_A_ROW:
                raise UserError(
                    f"regenerate: {IN_A_ROW} conversations in a row failed ({outcome.reason}); the answers so far are kept"
                    f" in {folder}: mend this and run again"
                )
        summary = {"settings": dict(identity), **account.summary()}
        journal.write_rows(account.ids)
        publish_json(folder / "summary.json", summary)
    if not summary["ok"]:
        reasons = summary["failed_because"] | summary["skipped_because"]
        raise UserError(
            f"regenerate: none of {summary['input']} documents was answered ({reasons}); mend the data or server"
        )
    return summary


class _Account:
    """Every document of the input ends in one of three counts."""

    def __init__(self, journal: "Journal", progress: Ticker) -> None:
        self.journal, self.progress = journal, progress
        self.input = self.before = 0
        self.ids: list[str] = []  # of the input, in its order, each once
        self.failed: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()

    def open(self, conversations: Iterable[Conversation]) -> Iterator[Dialogue]:
        """The dialogues that are still to be held."""
        seen: set[str] = set()
        for conversation in conversations:
            self.input += 1
            try:
                dialogue = open_dialogue(conversation)
                if dialogue.id in seen:
                    raise UnusableError("duplicate")
            except UnusableError as reason:
                self.add(Outcome("skipped", str(reason)))
                continue
            seen.add(dialogue.id)
            self.ids.append(dialogue.id)
            if dialogue.id in self.journal:
                self.before += 1
                self.progress.advance(1)
            else:
                yield dialogue

    def add(self, outcome: Outcome) -> None:
        if outcome.record is not None:
            self.journal.append(outcome.record)
        else:
            (self.failed if outcome.kind == "failed" else self.skipped)[outcome.reason] += 1
        self.progress.advance(1, f"{self.failed.total()} failed")

    def summary(self) -> dict[str, Any]:
        answered = [identity for identity in self.ids if identity in self.journal]
        counts = {"input": self.input, "ok": len(answered)}
        counts |= {"failed": self.failed.total(), "skipped": self.skipped.total()}
        if counts["ok"] + counts["failed"] + counts["skipped"] != self.input:
            raise RuntimeError(f"documents were lost or counted twice: {counts}")
        because = {"failed_because": dict(self.failed), "skipped_because": dict(self.skipped)}
        return counts | {"ok_before": self.before} | because | self.journal.about(answered)


class Journal:
    """`answers.jsonl`: appended line by line, found again by id. One process at a time may have it open."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.path = folder, folder / "answers.jsonl"
        self._file = self.path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise UserError(f"{folder}: another process writes answers here; wait until it has ended") from error
        self._places: dict[str, tuple[int, int]] = {}  # id -> (start, length)
        try:
            self._check(identity)
            self._read()
        except UserError:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def __contains__(self, identity: str) -> bool:
        return identity in self._places

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line in one call, so that a crash leaves at most its beginning."""
        line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        start = self._file.seek(0, os.SEEK_END)
        self._file.write(line)
        self._file.flush()
        self._places[record["id"]] = (start, len(line))

    def record(self, identity: str) -> dict[str, Any]:
        """The line of one conversation."""
        start, length = self._places[identity]
        self._file.seek(start)
        return json.loads(self._file.read(length))

    def about(self, ids: Iterable[str]) -> dict[str, Any]:
        """What the answers of these conversations are: generated tokens, how they ended, ids or text."""
        finishes: Counter[str] = Counter()
        ended: Counter[str] = Counter()
        kept: Counter[str] = Counter()
        generated = 0
        for record in map(self.record, ids):
            finishes.update(record["finish"])
            ended.update([record["ended"]] if record["ended"] else [])
            kept["text" if record["rows"] is None else "token ids"] += 1
            generated += sum(sum(row["loss_mask"]) for row in record["rows"] or ())
        return {
            "kept_as": dict(kept),
            "generated_tokens": generated,
            "finish": dict(finishes),
            "ended_early_because": dict(ended),
        }

    def write_rows(self, ids: Iterable[str]) -> None:
        """`rows.jsonl` of these conversations: token ids with their mask, or else messages; `draftsmith_group` keeps a
        conversation's rows on one side of the held-out split."""

        def write(temporary: Path) -> None:
            with temporary.open("w", encoding="utf-8") as file:
                for identity in ids:
                    if identity not in self:
                        continue
                    record = self.record(identity)
                    rows = record["rows"]
                    if rows is None:
                        rows = [{key: record[key] for key in ("messages", "tools") if record[key] is not None}]
                    for row in rows:
                        file.write(json.dumps({"id": identity, GROUP: identity, **row}, ensure_ascii=False) + "\n")

        publish(self.folder / "rows.jsonl", write)

    def _check(self, identity: Mapping[str, Any]) -> None:
        place = self.folder / "settings.json"
        if not place.is_file():
            publish_json(place, dict(identity))
            return
        try:
            old = dict(json.loads(place.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise UserError(f"{place}: damaged; write back what it held, or remove the folder to begin anew") from error
        for name in dict.fromkeys([*old, *identity]):
            if old.get(name) != identity.get(name):
                raise UserError(
                    f"{self.folder}: its answers were made with {name} {old.get(name)!r}, now it is {identity.get(name)!r};"
                    " set it back, or remove the folder to begin anew"
                )

    def _read(self) -> None:
        """Find all whole lines and cut off what a crash left of the last one."""
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                identity = json.loads(line)["id"]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{self.path}, line {number}: damaged; remove this line, its answer is made again"
                ) from error
            self._places.setdefault(identity, (end, len(line)))
            end += len(line)
        self._file.truncate(end)


def seed_of(seed: int, identity: str, turn: int) -> int:
    """A seed in [0, 2³¹) for one answer: what is drawn depends on neither the order nor the company of the conversations."""
    return int.from_bytes(hashlib.sha256(f"{seed} {identity} {turn}".encode()).digest()[:4], "big") >> 1
