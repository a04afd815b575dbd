"""Answers of the target: every document in exactly one count, none lost or swapped, whatever the server does (FAULTS 9)."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import tiny_target, tiny_tokenizer
from pydantic import ValidationError

from draftsmith.data import answer, regenerate
from draftsmith.data.answer import LocalEngine, ServerEngine, choose
from draftsmith.data.chat import generation_prompt
from draftsmith.data.corpus import DataSettings, Source
from draftsmith.data.prepare import prepare
from draftsmith.data.regenerate import Conversation, Journal, RegenerateSettings
from draftsmith.data.rows import Rows
from draftsmith.errors import UserError
from draftsmith.progress import Ticker

USER, ANSWER = {"role": "user", "content": "what is it?"}, {"role": "assistant", "content": "the sum"}
AGAIN, LATER = {"role": "user", "content": "and now?"}, {"role": "assistant", "content": "a fox"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
RESULT = {"role": "tool", "content": "3"}
END, PROMPT, KEY = 1, 1000 + len("assistant"), "a-very-secret-key"


def asking(number: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"question {number}"}, ANSWER]


def read(messages: list[dict[str, Any]]) -> list[int]:
    """The test server's tokens of a prompt."""
    ids = [token for m in messages for token in (1000 + len(m["role"]), *(m["content"] or "calls").encode(), END)]
    return [*ids, PROMPT]


class Server(ThreadingHTTPServer):
    """Answers `re: <last message>`. `before(messages, tries)` may delay, or return a status to fail with; 0 hangs up."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.before: Callable[[list[Any], int], int | None] = lambda _messages, _tries: None
        self.token_ids = True
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.tries: Counter[str] = Counter()
        self.answered: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, *_: object) -> None:
        """A client that was killed is no fault of the server."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server, question = self.server, json.dumps(body["messages"])
        server.bodies.append(body)
        server.keys.add(self.headers["Authorization"])
        server.tries[question] += 1
        status = server.before(body["messages"], server.tries[question])
        if status == 0:
            self.close_connection = True
            return
        reply = {"error": {"message": "too many tokens (4097)"}} if status else self.reply(body)
        data = json.dumps(reply).encode() if status != 200 else b"<html>"
        self.send_response(status or 200)
        self.send_header("Content-Length", str(len(data)))
        if status == 429:
            self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(data)
        if not status:
            server.answered.append(body["messages"][0]["content"])

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        text = f"re: {body['messages'][-1]['content']}"
        message = {"role": "assistant", "content": text, "tool_calls": [], "refusal": None}
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "stop"}
        if not (self.server.token_ids and body.get("return_token_ids")):
            return {"choices": [choice]}
        return {"choices": [choice | {"token_ids": [*text.encode(), END]}], "prompt_token_ids": read(body["messages"])}

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(answer, "FIRST_WAIT", 0.001)
    with Server() as running:
        threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield running
        running.shutdown()


def settings_of(server: Server, **options: Any) -> RegenerateSettings:
    return RegenerateSettings(**({"base_url": server.url, "model": "tiny", "concurrency": 8, "timeout": 20} | options))


def run(server: Server, folder: Path, chats: list[Any], **options: Any) -> dict[str, Any]:
    settings = settings_of(server, **options)
    conversations = [chat if isinstance(chat, Conversation) else Conversation(chat) for chat in chats]
    ticker = Ticker("regenerate", len(chats), "documents", None)
    return regenerate.regenerate(conversations, ServerEngine(settings), settings.identity(), folder, ticker)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def texts(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(question, answer) of rows of one turn, from the token ids alone."""
    found = []
    for row in rows:
        ids, mask = np.array(row["token_ids"]), np.array(row["loss_mask"], dtype=bool)
        assert mask[-1]
        assert not mask[: -mask.sum()].any()
        found.append((bytes(ids[1:-1][~mask[1:-1]][:-2].tolist()).decode(), bytes(ids[mask][:-1].tolist()).decode()))
    return found


def test_every_answer_belongs_to_its_question_whatever_the_order_and_the_failures(
    server: Server, tmp_path: Path
) -> None:
    chats = [asking(number) for number in range(40)]
    clean = run(server, tmp_path / "clean", chats, concurrency=1)

    def before(messages: list[Any], tries: int) -> int | None:
        number = int(messages[0]["content"].split()[1])
        time.sleep(0.002 * (number * 7 % 11))
        return {3: 500, 5: 429, 7: 0, 11: 200}.get(number % 13) if tries <= 2 else None

    server.before = before
    server.tries.clear()
    server.answered.clear()
    account = run(server, tmp_path / "rough", chats)
    assert server.answered != [chat[0]["content"] for chat in chats]
    counts = {"input": 40, "ok": 40, "failed": 0, "skipped": 0, "ok_before": 0, "kept_as": {"token ids": 40}}
    for about in (clean, account, json.loads((tmp_path / "rough" / "summary.json").read_text())):
        assert {key: about[key] for key in counts} == counts
    rows = lines(tmp_path / "rough" / "rows.jsonl")
    assert texts(rows) == [(f"question {number}", f"re: question {number}") for number in range(40)]
    assert (tmp_path / "rough" / "rows.jsonl").read_bytes() == (tmp_path / "clean" / "rows.jsonl").read_bytes()


def test_killed_in_the_middle_every_id_comes_exactly_once_after_resume(server: Server, tmp_path: Path) -> None:
    chats = [{"messages": asking(number)} for number in range(60)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    config = tmp_path / "x.yaml"
    config.write_text(
        f"run_root: {tmp_path}/runs\ndata: {{sources: [{{kind: json, path: {tmp_path}/chats.jsonl}}]}}\n"
        f"regenerate: {{base_url: '{server.url}', model: tiny, concurrency: 6}}\n"
    )
    server.before = lambda messages, _tries: time.sleep(0.01 * (int(messages[0]["content"].split()[1]) % 5 + 1))
    command = [sys.executable, "-m", "draftsmith", "regenerate", str(config)]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(server.answered) < 20 and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    journal = tmp_path / "runs/x/regenerated/answers.jsonl"
    whole = journal.read_bytes()
    assert 0 < whole.count(b"\n") < 60
    journal.write_bytes(whole[: whole.rindex(b"\n") + 1] + whole[: whole.index(b"\n") // 2])  # half a line at the end
    before = {line["messages"][0]["content"] for line in map(json.loads, whole.splitlines()[: whole.count(b"\n")])}
    server.tries.clear()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said = f"60 ok + 0 failed + 0 skipped = 60 documents ({len(before)} were answered before)"
    assert said in done.stdout.replace("\n", " ")
    records = lines(journal)
    assert sorted(record["messages"][0]["content"] for record in records) == sorted(f"question {n}" for n in range(60))
    assert len({record["id"] for record in records}) == 60
    assert all(r["messages"][1]["content"] == f"re: {r['messages'][0]['content']}" for r in records)
    asked = {json.loads(question)[0]["content"] for question in server.tries}
    assert asked == {f"question {n}" for n in range(60)} - before
    assert Counter(texts(lines(journal.with_name("rows.jsonl")))) == Counter(
        (f"question {n}", f"re: question {n}") for n in range(60)
    )


def test_failures_and_what_cannot_be_asked_are_counted_and_failures_alone_are_tried_again(
    server: Server, tmp_path: Path
) -> None:
    chats = [
        *map(asking, range(5)),
        Conversation(None),
        [ANSWER, USER],
        [{"role": "system", "content": "be brief"}],
        [{"role": "user", "content": None}, ANSWER],
        [],
        asking(0),
        [USER, CALL],
    ]
    status = {1: 500, 2: 400, 3: 503}
    server.before = lambda messages, _tries: status.get(int(messages[0]["content"].split()[1]))
    account = run(server, tmp_path, chats, retries=1)
    assert {key: account[key] for key in ("input", "ok", "failed", "skipped")} == {
        "input": 12,
        "ok": 2,
        "failed": 3,
        "skipped": 7,
    }
    assert account["failed_because"] == {"HTTP 500": 1, "HTTP 503": 1, "HTTP 400: too many tokens (####)": 1}
    assert account["skipped_because"] == {
        "not a conversation": 1,
        "assistant speaks first": 1,
        "no question": 2,
        "null content": 1,
        "duplicate": 1,
        "nothing to answer beside tool calls": 1,
    }
    status.clear()
    server.tries.clear()
    account = run(server, tmp_path, chats, retries=1)
    assert (account["ok"], account["ok_before"], account["failed"], account["skipped"]) == (5, 2, 0, 7)
    assert len(server.tries) == 3


def test_each_turn_is_asked_in_the_context_of_the_regenerated_ones_and_trained_as_generated(
    server: Server, tmp_path: Path
) -> None:
    run(server, tmp_path, [[USER, ANSWER, AGAIN, LATER]])
    first, second = server.bodies
    assert first["messages"] == [USER]
    assert second["messages"] == [USER, {"role": "assistant", "content": "re: what is it?"}, AGAIN]
    assert first["seed"] != second["seed"]
    (row,) = lines(tmp_path / "rows.jsonl")
    answers = [*b"re: what is it?", END], [*b"re: and now?", END]
    assert row["token_ids"] == read(second["messages"]) + answers[1]
    assert [t for t, m in zip(row["token_ids"], row["loss_mask"], strict=True) if m] == answers[0] + answers[1]


def test_question_without_an_answer_is_answered_too(server: Server, tmp_path: Path) -> None:
    run(server, tmp_path, [[USER, ANSWER, AGAIN]])
    assert [message["content"] for message in lines(tmp_path / "answers.jsonl")[0]["messages"]][-1] == "re: and now?"


def test_context_that_the_server_renders_anew_begins_a_row_of_the_same_group(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "read", lambda messages: [2000 + len(messages), PROMPT])
    run(server, tmp_path, [[USER, ANSWER, AGAIN, LATER]])
    first, second = lines(tmp_path / "rows.jsonl")
    assert first["draftsmith_group"] == second["draftsmith_group"]
    assert (first["token_ids"][0], second["token_ids"][0]) == (2001, 2003)


def test_later_turn_beyond_the_context_ends_the_conversation_and_keeps_the_turns_before(
    server: Server, tmp_path: Path
) -> None:
    server.before = lambda messages, _tries: 400 if len(messages) > 1 else None
    account = run(server, tmp_path, [[USER, ANSWER, AGAIN, LATER]])
    assert account["ok"] == 1
    assert account["ended_early_because"] == {"HTTP 400: too many tokens (####)": 1}
    assert len(lines(tmp_path / "answers.jsonl")[0]["messages"]) == 2


def test_tool_call_of_the_source_stays_context_and_needs_token_ids(server: Server, tmp_path: Path) -> None:
    chat = Conversation([USER, CALL, RESULT, LATER], [{"type": "function", "function": {"name": "add"}}])
    run(server, tmp_path / "ids", [chat])
    assert server.bodies[0]["messages"] == [USER, CALL, RESULT]
    assert server.bodies[0]["tools"] == chat.tools
    (row,) = lines(tmp_path / "ids" / "rows.jsonl")
    generated = [*b"re: 3", END]
    assert row["token_ids"][-len(generated) :] == generated
    assert sum(row["loss_mask"]) == len(generated)
    server.token_ids = False
    with pytest.raises(UserError, match="calls tools, and the server returns no token ids"):
        run(server, tmp_path / "text", [chat])


def test_server_without_token_ids_leaves_messages_and_a_note(server: Server, tmp_path: Path) -> None:
    server.token_ids = False
    account = run(server, tmp_path, [asking(1)])
    assert account["kept_as"] == {"text": 1}
    (row,) = lines(tmp_path / "rows.jsonl")
    assert row["messages"] == [asking(1)[0], {"role": "assistant", "content": "re: question 1"}]
    assert "token_ids" not in row


def test_sampling_settings_are_sent_recorded_and_refused_by_name_when_they_change(
    server: Server, tmp_path: Path
) -> None:
    options = {"temperature": 0.5, "top_p": 0.9, "max_new_tokens": 7, "seed": 3}
    account = run(server, tmp_path, [asking(1)], **options)
    (body,) = server.bodies
    assert (body["temperature"], body["top_p"], body["max_tokens"], body["model"]) == (0.5, 0.9, 7, "tiny")
    assert account["settings"].items() >= (options | {"by": "server", "model": "tiny"}).items()
    changes = {"temperature": 0.6, "top_p": 0.8, "max_new_tokens": 8, "seed": 4, "model": "other", "token_ids": False}
    for name, value in changes.items():
        with pytest.raises(UserError, match=f"made with {name} .*set it back, or remove the folder"):
            run(server, tmp_path, [asking(1)], **(options | {name: value}))
    run(server, tmp_path, [asking(1)], **options, concurrency=2, retries=0, timeout=5)
    assert len(server.bodies) == 1


def test_key_comes_from_the_environment_and_is_written_nowhere(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"api_key_env: THE_KEY is not set"):
        run(server, tmp_path, [asking(1)], api_key_env="THE_KEY")
    monkeypatch.setenv("THE_KEY", KEY)
    run(server, tmp_path, [asking(1)], api_key_env="THE_KEY")
    assert server.keys == {f"Bearer {KEY}"}
    assert all(KEY not in path.read_text() for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.parametrize("status", [401, 404])
def test_what_no_conversation_would_change_ends_the_run_in_one_line(
    status: int, server: Server, tmp_path: Path
) -> None:
    server.before = lambda _messages, _tries: status
    with pytest.raises(UserError, match=rf"base_url: http\S* answered {status} .*correct base_url"):
        run(server, tmp_path, [asking(1), asking(2)])


def test_server_that_breaks_down_ends_the_run_and_the_answers_so_far_stay(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regenerate, "IN_A_ROW", 5)
    server.before = lambda _messages, _tries: 503 if len(server.answered) >= 4 else None
    with pytest.raises(UserError, match="5 conversations in a row failed"):
        run(server, tmp_path, [asking(number) for number in range(30)], retries=0, concurrency=1)
    assert len(lines(tmp_path / "answers.jsonl")) == 4


def test_journal_is_of_one_process_and_a_damaged_line_is_named(tmp_path: Path) -> None:
    with Journal(tmp_path, {}) as journal:
        journal.append({"id": "a"})
        journal.append({"id": "b"})
        with pytest.raises(UserError, match="another process writes answers here"):
            Journal(tmp_path, {})
    path = tmp_path / "answers.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"a"', b'"a'))
    with pytest.raises(UserError, match="line 1: damaged"):
        Journal(tmp_path, {})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"base_url": "localhost:8000"}, "must be http"),
        ({"base_url": "http://me:secret@host/v1"}, "without user, password"),
        ({"base_url": "http://host/v1"}, "needs model"),
        ({"base_url": "http://host/v1", "model": "m", "api_key_env": "sk-123"}, "never the key itself"),
        ({"model": "m"}, "model is of a server"),
        ({"retries": 1}, "retries is of a server"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        RegenerateSettings(**options)


def local(folder: Path, chats: list[Any], **options: Any) -> dict[str, Any]:
    settings = RegenerateSettings(**({"max_new_tokens": 8, "concurrency": 3} | options))
    engine = LocalEngine(tiny_target(), settings)
    ticker = Ticker("regenerate", len(chats), "documents", None)
    return regenerate.regenerate(map(Conversation, chats), engine, settings.identity(), folder, ticker)


CHATS = [[{"role": "user", "content": "what " * n}, ANSWER, AGAIN, LATER][: 2 + n % 3] for n in range(1, 8)]


def test_greedy_answers_of_a_batch_are_those_of_plain_decoding_and_follow_the_generation_prompt(tmp_path: Path) -> None:
    account = local(tmp_path, CHATS)
    assert (account["input"], account["ok"]) == (len(CHATS), len(CHATS))
    target, tokenizer = tiny_target(), tiny_tokenizer()
    stops = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|end|>")}
    for record in lines(tmp_path / "answers.jsonl"):
        starts = [i for i, message in enumerate(record["messages"]) if message["role"] == "assistant"]
        assert len(starts) == len(record["finish"])
        for start, finish in zip(starts, record["finish"], strict=True):
            prompt = generation_prompt(record["messages"][:start], tokenizer)
            rows = [row for row in record["rows"] if row["token_ids"][: len(prompt)] == prompt]
            (row,) = rows
            ids = list(prompt)
            while True:
                with torch.inference_mode():
                    ids.append(int(target.forward(torch.tensor([ids])).logits[0, -1].argmax()))
                if ids[-1] in stops or len(ids) - len(prompt) == 8:
                    break
            assert row["token_ids"][: len(ids)] == ids
            assert all(row["loss_mask"][len(prompt) : len(ids)])
            assert finish == ("stop" if ids[-1] in stops else "length")


def test_sampled_answers_depend_on_the_seed_and_not_on_the_batch(tmp_path: Path) -> None:
    def rows(name: str, **options: Any) -> bytes:
        local(tmp_path / name, CHATS, temperature=1.0, **options)
        return (tmp_path / name / "rows.jsonl").read_bytes()

    alone = rows("alone", concurrency=1)
    assert rows("together", concurrency=7) == alone
    assert rows("seed", seed=1) != alone


def test_generation_stops_at_the_end_of_turn_even_where_it_is_not_eos() -> None:
    target = tiny_target()
    assert target.tokenizer.convert_tokens_to_ids("<|end|>") not in target.eos_ids
    assert target.tokenizer.convert_tokens_to_ids("<|end|>") in LocalEngine(target, RegenerateSettings()).stops


def test_prompt_that_fills_the_context_is_skipped_and_one_that_nearly_does_is_answered_as_far_as_it_goes(
    tmp_path: Path,
) -> None:
    tokenizer = tiny_tokenizer()
    room = 256 - len(generation_prompt([{"role": "user", "content": "x" * 200}], tokenizer))
    nearly, full = ([{"role": "user", "content": "x" * (200 + room - n)}, ANSWER] for n in (3, 0))
    account = local(tmp_path, [nearly, full])
    assert account["skipped_because"] == {"prompt longer than the target's context": 1}
    (record,) = lines(tmp_path / "answers.jsonl")
    assert sum(record["rows"][0]["loss_mask"]) <= 3


def test_prepare_reads_the_rows_back_as_they_were_generated(tmp_path: Path) -> None:
    local(tmp_path / "regenerated", CHATS)
    path = tmp_path / "regenerated" / "rows.jsonl"
    settings = DataSettings(sources=(Source(kind="json", path=str(path)),), held_out=0.3, max_length=256)
    prepare(settings, tiny_tokenizer(), tmp_path / "rows")
    found = {
        (tuple(row.token_ids.tolist()), tuple(row.supervised.tolist()))
        for split in ("train", "held_out")
        for row in Rows.open(tmp_path / "rows", split)
    }
    assert found == {(tuple(row["token_ids"]), tuple(map(bool, row["loss_mask"]))) for row in lines(path)}


@pytest.mark.parametrize(
    ("temperature", "top_p", "kept"), [(1.0, 1.0, 4), (1.0, 0.75, 2), (2.0, 1.0, 4), (1.0, 1e-9, 1)]
)
def test_draws_follow_temperature_and_top_p(temperature: float, top_p: float, kept: int) -> None:
    """8000 draws: a frequency is within 4.5 standard deviations of its probability, false alarm below 1e-4 in all."""
    logits = torch.tensor([[0.15, 0.5, 0.05, 0.3]]).log()
    p = (logits[0].double() / temperature).softmax(-1).numpy()
    p[np.argsort(-p)[kept:]] = 0
    p /= p.sum()
    settings = RegenerateSettings(temperature=temperature, top_p=top_p)
    n = 8000
    streams = [np.random.default_rng(seed) for seed in range(n)]
    drawn = np.bincount(choose(logits.expand(n, 4), settings, streams), minlength=4) / n
    assert (np.abs(drawn - p) <= 4.5 * np.sqrt(p * (1 - p) / n)).all()


@pytest.mark.parametrize("content", ["half \ud83d", ["a"], {"text": "a"}, 5])
def test_an_answer_that_could_not_be_kept_is_malformed(content: Any) -> None:
    said = {"choices": [{"message": {"content": content}, "finish_reason": "stop"}]}
    with pytest.raises((ValueError, TypeError)):
        answer._read(said)


@pytest.mark.parametrize("content", ["{", "[1]", "7", ""])
def test_damaged_settings_beside_the_answers_are_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text(content)
    with pytest.raises(UserError, match=r"settings.json: damaged"):
        Journal(tmp_path, {"seed": 0})
