"""A small target from scratch: rows of text -> a Llama-architecture model in an ordinary `transformers` folder.

Knows the model's shape, the mixture of domains and the recipe. Does not know where text comes from, nor any draft.
"""

import json
import math
import resource
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from draftsmith.data.batches import Batch, collate_rows, fill_batches, length_buckets
from draftsmith.data.rows import Rows
from draftsmith.data.tokenizer import END
from draftsmith.errors import UserError
from draftsmith.files import digest, publish_text
from draftsmith.progress import Ticker, ticker
from draftsmith.train.bigram import count_bigrams, fit_bigrams
from draftsmith.train.checkpoint import Checkpoints, capture, restore
from draftsmith.train.optim import MuonAdamW, compute_dtype, make_optimizer, schedule, set_learning_rate
from draftsmith.train.settings import ScratchSettings

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM

Log = Callable[[dict[str, float], int], None]
CHECKPOINT_EVERY = 50  # steps
HEAD_ROWS = 1024  # logits of this many tokens at a time: they then stay in the caches of a CPU


def model_config(settings: ScratchSettings, tokenizer: Any = None) -> "LlamaConfig":
    """The shape as `transformers` writes it; special tokens where a tokenizer is given."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=settings.vocabulary,
        hidden_size=settings.width,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.blocks,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        max_position_embeddings=settings.context,
        tie_word_embeddings=settings.tied,
        bos_token_id=tokenizer and tokenizer.bos_token_id,
        eos_token_id=tokenizer and tokenizer.eos_token_id,
        pad_token_id=tokenizer and tokenizer.pad_token_id,
    )


def new_model(settings: ScratchSettings, tokenizer: Any, seed: int) -> "LlamaForCausalLM":
    """Random weights, made for a short training by Muon: every block starts as the identity (its two output matrices
    are zero), every other matrix keeps the scale of its input, and the head starts near the uniform distribution."""
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(model_config(settings, tokenizer))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    parameter.zero_()
                elif "embed_tokens" in name:
                    parameter.normal_(0, 0.02 if settings.tied else 0.5)  # tied: it is the head as well
                elif "lm_head" in name:
                    parameter.normal_(0, 0.002)
                elif parameter.ndim == 2:
                    parameter.normal_(0, 0.7 / math.sqrt(parameter.shape[1]))
    ends = {tokenizer.eos_token_id, tokenizer.get_vocab().get(END)} - {None}
    model.generation_config.eos_token_id = sorted(ends) or None
    return model


def _members(rows: Rows) -> dict[str, np.ndarray]:
    """The row numbers of each domain."""
    domain_of = np.asarray([rows.domain(index) for index in range(len(rows))])
    return {domain: np.flatnonzero(domain_of == domain) for domain in rows.domains}


def domain_shares(rows: Rows, balance: float) -> dict[str, float]:
    """Each domain's share of what is trained: its tokens to the power of `balance`, over the sum of all domains'."""
    weights = {domain: float(rows.lengths[own].sum()) ** balance for domain, own in _members(rows).items()}
    return {domain: weight / sum(weights.values()) for domain, weight in weights.items()}


def batch_plan(rows: Rows, settings: ScratchSettings, seed: int) -> list[list[int]]:
    """Row numbers of every step, fixed by the seed: rows drawn from the domains by their weights, until `tokens`.

    Each row of a domain comes once before any comes again; a batch holds rows of similar length.
    """
    rng = np.random.default_rng(seed)
    lengths = rows.lengths
    members = _members(rows)
    sizes = {domain: int(lengths[own].sum()) for domain, own in members.items()}
    drawn: list[np.ndarray] = []
    for domain, share in domain_shares(rows, settings.balance).items():
        budget, own = share * settings.tokens, members[domain]
        epochs = math.ceil(budget / sizes[domain])
        order = np.concatenate([rng.permutation(own) for _ in range(epochs)])
        drawn.append(order[: int(np.searchsorted(np.cumsum(lengths[order]), budget)) + 1])
    chosen = np.concatenate(drawn)
    return [chosen[batch].tolist() for batch in length_buckets(lengths[chosen], settings.batch_tokens, rng)]


def batch_loss(model: Any, batch: Batch) -> tuple[Tensor, int]:
    """(Σ of -log p over the supervised tokens, how many they are); the head runs on those alone, in chunks of rows."""
    dtype = compute_dtype(batch.token_ids.device)
    with torch.autocast(batch.token_ids.device.type, dtype, enabled=dtype is torch.bfloat16):
        states = model.model(batch.token_ids[:, :-1], use_cache=False).last_hidden_state
        trained = batch.supervised[:, 1:]
        states, truth = states[trained], batch.token_ids[:, 1:][trained]
        total = torch.zeros((), device=states.device)
        for some, wanted in zip(states.split(HEAD_ROWS), truth.split(HEAD_ROWS), strict=True):
            total = total + nn.functional.cross_entropy(model.lm_head(some).float(), wanted, reduction="sum")
    return total, len(truth)


@torch.no_grad()
def held_out_loss(model: Any, rows: Rows, settings: ScratchSettings) -> dict[str, float]:
    """Mean -log p (nats per supervised token) of each domain, over its first `held_out_tokens` tokens."""
    lengths, losses = rows.lengths, {}
    device = next(model.parameters()).device
    for domain, own in _members(rows).items():
        own = own[: int(np.searchsorted(np.cumsum(lengths[own]), settings.held_out_tokens)) + 1]
        sums = [
            batch_loss(model, collate_rows([rows[index] for index in batch]).to(device))
            for batch in fill_batches(own, lengths, max(4096, settings.batch_tokens))
        ]
        losses[domain] = sum(float(total) for total, _ in sums) / max(1, sum(count for _, count in sums))
    return losses


def pretrain(
    tokenizer: Any,
    train: Rows,
    held_out: Rows,
    settings: ScratchSettings,
    folder: Path,
    seed: int,
    log: Log | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Train a model on `train` and publish it, tokenizer included, as `folder` with its `training.jsonl`.

    Returns parameters, steps, tokens, seconds and the held-out loss per domain in nats per token. The weights depend
    on rows, settings, seed and the number of threads alone. The folder appears complete or not at all; a run that was ended at
    any instant continues from its last checkpoint, beside it, as if nothing had happened.
    Raises `UserError` for rows longer than the context, a tokenizer larger than the vocabulary, a diverging loss.
    """
    if len(tokenizer) > settings.vocabulary:
        raise UserError(f"target.scratch.vocabulary: {settings.vocabulary}, but the tokenizer has {len(tokenizer)}")
    if (longest := int(max(train.lengths.max(), held_out.lengths.max()))) > settings.context:
        raise UserError(
            f"target.scratch.context: {settings.context}, but rows have up to {longest} tokens; lower data.max_length"
        )
    model = new_model(settings, tokenizer, seed).to(device).train()
    partial = folder.with_name(f".{folder.name}.partial")
    training = _Run(model, train, settings, seed, partial)
    training.train(log)
    seconds = training.seconds
    model.eval()
    losses = held_out_loss(model, held_out, settings)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": training.at.step,
        "tokens": training.tokens,
        "seconds": seconds,
        "held_out_loss": losses,
    }


@dataclass
class _Position:
    """Where a run stands. lines: of training.jsonl; seconds: of all parts of the run."""

    step: int = 0
    lines: str = ""
    seconds: float = 0.0


class _Run:
    """One training from its start or its last checkpoint, which lies in `partial`, to its end."""

    def __init__(self, model: nn.Module, rows: Rows, settings: ScratchSettings, seed: int, partial: Path) -> None:
        self.model, self.rows, self.settings, self.seed, self.partial = model, rows, settings, seed, partial
        self.optimizer = make_optimizer(
            model, settings.matrix_lr, settings.other_lr, settings.weight_decay, settings.embedding_lr
        )
        self.plan = batch_plan(rows, settings, seed)
        self.identity = digest({"settings": settings.model_dump(mode="json"), "seed": seed, "rows": rows.digest})
        self.checkpoints = Checkpoints(partial / "checkpoints")
        self.at = _Position()
        self.started = time.monotonic()

    @property
    def tokens(self) -> int:
        """Tokens seen so far."""
        return sum(int(self.rows.lengths[batch].sum()) for batch in self.plan[: self.at.step])

    @property
    def seconds(self) -> float:
        """Of this and earlier parts."""
        return self.at.seconds + time.monotonic() - self.started

    def train(self, log: Log | None) -> None:
        """All steps that are left, one line of training.jsonl for each logged one."""
        self._begin()
        left = sum(int(self.rows.lengths[batch].sum()) for batch in self.plan) - self.tokens
        path = self.partial / "training.jsonl"
        publish_text(path, self.at.lines)  # later lines come again
        with path.open("a", encoding="utf-8") as lines, ticker("train target", left, "tokens") as progress:
            while self.at.step < len(self.plan):
                self._one(lines, progress, log)
                if self.at.step % CHECKPOINT_EVERY == 0 and self.at.step < len(self.plan):
                    self._save()
        self.checkpoints.clear()

    def _begin(self) -> None:
        place = self.checkpoints.newest(_say)
        state, tensors = self.checkpoints.read(place) if place is not None else ({}, {})
        if state.get("identity") == self.identity:
            restore(self.model, self.optimizer, tensors)
            self.at = _Position(**state["position"])
            _say(f"continues at step {self.at.step} of {len(self.plan)}")
            return
        shutil.rmtree(self.partial, ignore_errors=True)  # nothing, or the beginning of another target
        self.partial.mkdir(parents=True)
        if self.settings.bigram_epochs:
            bigrams = count_bigrams(
                self.rows, domain_shares(self.rows, self.settings.balance), self.settings.vocabulary
            )
            fit_bigrams(self.model, bigrams, self.settings.bigram_epochs, self.settings.bigram_lr, self.seed)

    def _one(self, lines: IO[str], progress: Ticker, log: Log | None) -> None:
        step, settings, numbers = self.at.step, self.settings, self.plan[self.at.step]
        set_learning_rate(self.optimizer, schedule(step, len(self.plan), round(settings.warmup * len(self.plan))))
        batch = collate_rows([self.rows[number] for number in numbers]).to(next(self.model.parameters()).device)
        loss = _step(self.model, batch, self.optimizer, settings.clip)
        if not math.isfinite(loss):
            raise UserError(f"target.scratch: the loss is {loss} at step {step + 1}; lower the learning rates")
        progress.advance(int(self.rows.lengths[numbers].sum()), f"loss {loss:.3f}")
        self.at.step += 1
        if step % settings.log_every == 0 or self.at.step == len(self.plan):
            record = {
                "loss": loss,
                "learning_rate": self.optimizer.param_groups[0]["lr"],
                "tokens_per_second": progress.rate,
                "memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            }
            lines.write(json.dumps({"step": self.at.step, **record}) + "\n")
            lines.flush()
            if log is not None:
                log(record, self.at.step)

    def _save(self) -> None:
        lines = (self.partial / "training.jsonl").read_text(encoding="utf-8")
        position = _Position(self.at.step, lines, self.seconds)
        state = {"identity": self.identity, "position": asdict(position)}
        self.checkpoints.save(self.at.step, capture(self.model, self.optimizer), state)


def _say(text: str) -> None:
    print(f"train target: {text}", file=sys.stderr, flush=True)


def _step(model: nn.Module, batch: Batch, optimizer: MuonAdamW, clip: float) -> float:
    """One optimiser step; the mean loss of its supervised tokens."""
    total, count = batch_loss(model, batch)
    loss = total / max(count, 1)
    loss.backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())
