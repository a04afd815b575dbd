"""Who answers: the target in this process, in batches, or an OpenAI-compatible server, many requests at once.

Knows sampling, requests and retries. Does not know what becomes of the answers (`draftsmith.data.regenerate`).
"""

import json
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import numpy as np

from draftsmith.data.chat import UnusableError, generation_prompt, render
from draftsmith.data.regenerate import AnswerError, Dialogue, Outcome, RefusedError, RegenerateSettings, Turn, seed_of
from draftsmith.errors import UserError

if TYPE_CHECKING:
    import httpx
    from torch import Tensor

    from draftsmith.models.target import Target

RETRIED = (408, 409, 425, 429)  # and all from 500
OURS = (401, 403, 404)  # what no other conversation would change: key, address, name of the model
FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0  # seconds; doubled from one attempt to the next
PROBE = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})


class LocalEngine:
    """The target itself. Each answer has a random stream of its own: it does not depend on the batch that it is in."""

    def __init__(self, target: "Target", settings: RegenerateSettings) -> None:
        self.target, self.settings = target, settings
        self.stops = target.eos_ids | _end_of_turn(target.tokenizer)

    def answer(self, dialogues: Iterator[Dialogue]) -> Iterator[Outcome]:
        active: list[tuple[Dialogue, list[int]]] = []
        more = True
        while active or more:
            while more and len(active) < self.settings.concurrency:
                dialogue = next(dialogues, None)
                if dialogue is None:
                    more = False
                else:
                    yield from self._go_on(dialogue, active)
            batch, active = active, []
            for dialogue, turn in zip((one for one, _ in batch), self._answers(batch), strict=True):
                dialogue.take(turn)
                yield from self._go_on(dialogue, active)

    def _go_on(self, dialogue: Dialogue, active: list[tuple[Dialogue, list[int]]]) -> Iterator[Outcome]:
        """Put the dialogue's next question among `active`, or yield its outcome."""
        asked = dialogue.asked()
        if asked is None:
            yield dialogue.outcome()
            return
        try:
            prompt = generation_prompt(asked, self.target.tokenizer, dialogue.tools)
            if len(prompt) >= self.target.context:
                raise UnusableError("prompt longer than the target's context")
        except UnusableError as reason:
            yield dialogue.fail(reason)
            return
        active.append((dialogue, prompt))

    def _answers(self, batch: list[tuple[Dialogue, list[int]]]) -> list[Turn]:
        if not batch:
            return []
        seeds = [seed_of(self.settings.seed, dialogue.id, len(dialogue.finishes)) for dialogue, _ in batch]
        answers = generate(self.target, [prompt for _, prompt in batch], self.stops, self.settings, seeds)
        return [self._turn(prompt, ids) for (_, prompt), ids in zip(batch, answers, strict=True)]

    def _turn(self, prompt: list[int], ids: list[int]) -> Turn:
        stopped = ids[-1] in self.stops
        text = self.target.tokenizer.decode(ids[:-1] if stopped else ids, skip_special_tokens=True)
        return Turn({"role": "assistant", "content": text}, prompt, ids, "stop" if stopped else "length")


def _end_of_turn(tokenizer: Any) -> frozenset[int]:
    """The token that ends an answer in the chat template, where it is a special one: it need not be EOS."""
    try:
        last = int(render(PROBE, tokenizer)[-1].token_ids[-1])
    except UnusableError:  # a template that cannot show an answer without reasoning, say: EOS ends it
        return frozenset()
    return frozenset([last]) & (set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder))


def generate(
    target: "Target", prompts: list[list[int]], stops: frozenset[int], settings: RegenerateSettings, seeds: list[int]
) -> list[list[int]]:
    """New tokens of each prompt until one of `stops` (kept), `max_new_tokens`, or the end of the target's context."""
    import torch

    caps = [min(settings.max_new_tokens, target.context - len(prompt)) for prompt in prompts]
    streams = [np.random.default_rng(seed) for seed in seeds]
    answers: list[list[int]] = [[] for _ in prompts]
    device = target.device
    with torch.inference_mode():
        cache = target.new_cache(len(prompts), max(len(p) + cap for p, cap in zip(prompts, caps, strict=True)))
        width = max(map(len, prompts)) - 1
        if width:  # all but the last token of each: that one is pending
            padded = [prompt[:-1] + [0] * (width - len(prompt) + 1) for prompt in prompts]
            target.forward(torch.tensor(padded, device=device), cache=cache, want_logits=False)
            cache.set_lengths(torch.tensor([len(prompt) - 1 for prompt in prompts], device=device))
        active = list(range(len(prompts)))
        pending = [prompt[-1] for prompt in prompts]
        while active:
            out = target.forward(torch.tensor(pending, device=device)[:, None], cache=cache)
            cache.set_lengths(cache.lengths + 1)
            assert out.logits is not None
            pending = choose(out.logits[:, -1], settings, [streams[row] for row in active])
            for row, token in zip(active, pending, strict=True):
                answers[row].append(token)
            going = [
                place
                for place, row in enumerate(active)
                if answers[row][-1] not in stops and len(answers[row]) < caps[row]
            ]
            if 0 < len(going) < len(active):
                cache.select(torch.tensor(going, device=device))
            active, pending = [active[place] for place in going], [pending[place] for place in going]
    return answers


def choose(logits: "Tensor", settings: RegenerateSettings, streams: list[np.random.Generator]) -> list[int]:
    """logits [B, V] → a token for each row: the likeliest at temperature 0, else one drawn from the smallest set of likeliest
    tokens whose mass reaches top_p (Holtzman et al., arXiv 1904.09751)."""
    if settings.temperature == 0.0:
        return logits.argmax(-1).tolist()
    p, order = (logits.double() / settings.temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
    before = p.cumsum(-1) - p
    mass = p.masked_fill(before >= settings.top_p, 0.0).cumsum(-1).cpu().numpy()
    draws = np.array([stream.random() for stream in streams])[:, None] * mass[:, -1:]
    places = (mass <= draws).sum(-1)
    return [int(order[row, place]) for row, place in enumerate(places)]


class ServerEngine:
    """A server with the chat completions of OpenAI's API, such as vLLM or SGLang, asked by as many threads as are allowed."""

    def __init__(self, settings: RegenerateSettings) -> None:
        """Raises `UserError` where the environment lacks the key that the settings name."""
        import httpx

        headers = {}
        if settings.api_key_env is not None:
            key = os.environ.get(settings.api_key_env)
            if not key:
                raise UserError(
                    f"regenerate.api_key_env: {settings.api_key_env} is not set; export it, or remove the field"
                )
            headers["Authorization"] = f"Bearer {key}"
        self.settings = settings
        self._stopping = threading.Event()
        self._client = httpx.Client(
            base_url=str(settings.base_url),
            headers=headers,
            timeout=settings.timeout,
            limits=httpx.Limits(max_connections=settings.concurrency),
        )

    def answer(self, dialogues: Iterator[Dialogue]) -> Iterator[Outcome]:
        waiting: set[Future[Outcome]] = set()
        pool = ThreadPoolExecutor(self.settings.concurrency)
        try:
            for dialogue in dialogues:
                waiting.add(pool.submit(self._hold, dialogue))
                if len(waiting) >= self.settings.concurrency:
                    done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        finally:  # also where the user stops it: nobody waits for answers that nobody takes
            self._stopping.set()
            self._client.close()
            pool.shutdown(cancel_futures=True)

    def _hold(self, dialogue: Dialogue) -> Outcome:
        try:
            while (asked := dialogue.asked()) is not None:
                seed = seed_of(self.settings.seed, dialogue.id, len(dialogue.finishes))
                dialogue.take(self._ask(asked, dialogue.tools, seed))
        except (AnswerError, UnusableError) as error:
            return dialogue.fail(error)
        return dialogue.outcome()

    def _ask(self, messages: list[dict[str, Any]], tools: Any, seed: int) -> Turn:
        body = self._body(messages, tools, seed)
        pause, problem = FIRST_WAIT, ""
        for attempt in range(self.settings.retries + 1):
            if attempt and self._stopping.wait(min(pause * (1 + random.random()), LONGEST_WAIT)):
                break
            turn, problem, asked_for = self._attempt(body)
            if turn is not None:
                return turn
            pause = max(FIRST_WAIT * 2**attempt, asked_for)
        raise AnswerError(problem or "stopped")

    def _body(self, messages: list[dict[str, Any]], tools: Any, seed: int) -> dict[str, Any]:
        settings = self.settings
        body = {"model": settings.model, "messages": messages, "temperature": settings.temperature}
        body |= {"top_p": settings.top_p, "max_tokens": settings.max_new_tokens, "seed": seed}
        return body | ({"tools": tools} if tools else {}) | ({"return_token_ids": True} if settings.token_ids else {})

    def _attempt(self, body: dict[str, Any]) -> tuple[Turn | None, str, float]:
        """(the answer, or None; what is wrong; seconds that the server asks for). Raises where another try is no use."""
        import httpx

        try:
            response = self._client.post("chat/completions", json=body)
        except httpx.TimeoutException:
            return None, "timeout", 0.0
        except (httpx.RequestError, RuntimeError) as error:  # the second: the client is closed, we are stopping
            return None, f"no connection ({type(error).__name__})", 0.0
        status = response.status_code
        if status in RETRIED or status >= 500:
            asked_for = response.headers.get("retry-after", "")
            return None, f"HTTP {status}", float(asked_for) if asked_for.isdecimal() else 0.0
        if status in OURS:
            raise UserError(
                f"regenerate.base_url: {response.url} answered {status} ({_said(response)}); correct base_url (it ends in /v1),"
                " model, or the key in the variable that api_key_env names"
            )
        if not response.is_success:
            raise RefusedError(f"HTTP {status}: {_said(response)}")
        try:
            return _read(response.json()), "", 0.0
        except (ValueError, KeyError, IndexError, TypeError):
            return None, "malformed answer", 0.0


def _read(answer: dict[str, Any]) -> Turn:
    """The first choice of a chat completion, with its ids where the server gives them."""
    choice = answer["choices"][0]
    said = {key: value for key, value in choice["message"].items() if value}
    fields = ("content", "reasoning_content", "reasoning", "tool_calls")
    message = {"role": "assistant", "content": "", **{key: said[key] for key in fields if key in said}}
    if not isinstance(message["content"], str):
        raise TypeError("content is not text")
    json.dumps(message, ensure_ascii=False).encode()  # half a surrogate pair could neither be kept nor sent again
    prompt_ids, token_ids = answer.get("prompt_token_ids"), choice.get("token_ids")
    finish = str(choice.get("finish_reason") or "unknown")
    if prompt_ids is None or token_ids is None:
        return Turn(message, None, None, finish)
    return Turn(message, [int(token) for token in prompt_ids], [int(token) for token in token_ids], finish)


def _said(response: "httpx.Response") -> str:
    """The server's own words, in one short line; digits are left out, so that equal refusals count as one."""
    try:
        answer = response.json()
        error = answer.get("error", answer) if isinstance(answer, dict) else answer
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except ValueError:
        text = response.text
    return "".join("#" if sign.isdigit() else sign for sign in " ".join(text.split())[:100])
