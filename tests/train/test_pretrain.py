"""A target from scratch: shapes refused, the mixture, the masked loss, reproducible weights, a folder complete or absent."""

import json
import math
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import tiny_rows, tiny_tokenizer
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.data.batches import collate_rows
from draftsmith.data.rows import Rows
from draftsmith.errors import UserError
from draftsmith.models.target import Target
from draftsmith.train import pretrain as module
from draftsmith.train.pretrain import batch_loss, batch_plan, model_config, new_model, pretrain
from draftsmith.train.settings import ScratchSettings

TINY: dict[str, Any] = {
    "vocabulary": 152, "width": 16, "blocks": 2, "heads": 4, "kv_heads": 2, "intermediate": 24, "context": 64,
    "tokens": 1500, "batch_tokens": 64, "log_every": 5, "held_out_tokens": 100,
}  # fmt: skip


def tiny(**changes: Any) -> ScratchSettings:
    return ScratchSettings(**(TINY | changes))


def run(rows: Rows, folder: Path, seed: int = 0, **changes: Any) -> dict[str, Any]:
    return pretrain(tiny_tokenizer(), rows, rows, tiny(**changes), folder, seed)


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    return tiny_rows(tmp_path, [9, 30, 12, 20, 5, 31, 17, 8, 26])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"width": 18}, "width 18 is not a multiple of heads 4"),
        ({"width": 20}, "odd"),
        ({"kv_heads": 3}, "heads 4 is not a multiple of kv_heads 3"),
        ({"blocks": 0}, "blocks"),
        ({"matrix_lr": 0}, "matrix_lr"),
    ],
)
def test_impossible_shapes_and_rates_are_refused_by_the_settings(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        tiny(**change)


def test_rows_longer_than_the_context_and_a_tokenizer_above_the_vocabulary_are_refused(
    rows: Rows, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"context: 30, but rows have up to 31 tokens"):
        run(rows, tmp_path / "target", context=30)
    with pytest.raises(UserError, match=r"vocabulary: 100, but the tokenizer has 150"):
        run(rows, tmp_path / "target", vocabulary=100)
    assert not (tmp_path / "target").exists()


def test_the_plan_is_fixed_by_the_seed_and_ends_at_the_token_budget(rows: Rows) -> None:
    plan = batch_plan(rows, tiny(), seed=3)
    assert plan == batch_plan(rows, tiny(), seed=3)
    assert plan != batch_plan(rows, tiny(), seed=4)
    tokens = sum(int(rows.lengths[batch].sum()) for batch in plan)
    assert 1500 <= tokens < 1500 + 3 * rows.lengths.max()


def test_every_row_of_a_domain_comes_before_any_comes_again(rows: Rows) -> None:
    seen = Counter(row for batch in batch_plan(rows, tiny(), seed=0) for row in batch)
    for domain in rows.domains:
        times = [seen[index] for index in range(len(rows)) if rows.domain(index) == domain]
        assert max(times) - min(times) <= 1


@pytest.mark.parametrize("balance", [0.0, 0.5, 1.0])
def test_domains_share_the_tokens_by_their_size_to_the_power_of_balance(tmp_path: Path, balance: float) -> None:
    rows = tiny_rows(tmp_path, [40, 10, 5] * 6)  # code, prose, chat
    plan = batch_plan(rows, tiny(tokens=20_000, balance=balance), seed=0)
    found = Counter[str]()
    for index in (row for batch in plan for row in batch):
        found[rows.domain(index)] += int(rows.lengths[index])
    weights = {"code": 240**balance, "prose": 60**balance, "chat": 30**balance}
    for domain, weight in weights.items():
        assert found[domain] / found.total() == pytest.approx(weight / sum(weights.values()), abs=0.005)


def test_loss_of_a_padded_batch_is_the_sum_over_supervised_tokens_of_each_row(rows: Rows) -> None:
    model = new_model(tiny(), tiny_tokenizer(), seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        total, count = batch_loss(model, collate_rows(rows[:4]))
        expected = 0.0
        for row in rows[:4]:
            ids = torch.from_numpy(row.token_ids.astype(np.int64))[None]
            log_probs = model(ids).logits[0].log_softmax(-1)
            expected -= sum(float(log_probs[t - 1, ids[0, t]]) for t in np.flatnonzero(row.supervised))
    assert count == sum(int(row.supervised.sum()) for row in rows[:4])
    assert float(total) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_a_new_model_starts_at_the_uniform_distribution(rows: Rows, tied: bool) -> None:
    model = new_model(tiny(tied=tied), tiny_tokenizer(), seed=0)
    with torch.no_grad():
        total, count = batch_loss(model, collate_rows(rows[:6]))
    assert float(total) / count == pytest.approx(math.log(152), abs=0.05)


def test_the_same_seed_gives_bit_equal_weights_and_another_seed_others(rows: Rows, tmp_path: Path) -> None:
    weights = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(rows, tmp_path / name, seed=seed, tokens=300)
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]


def test_training_learns_its_rows_and_leaves_the_callers_random_state_alone(rows: Rows, tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    result = run(rows, tmp_path / "target", tokens=5000, embedding_lr=0.05, other_lr=0.02)
    assert torch.equal(torch.rand(1), expected)
    assert set(result["held_out_loss"]) == {"code", "prose", "chat"}
    assert all(loss < 0.6 * math.log(152) for loss in result["held_out_loss"].values())


def test_the_warm_start_from_pairs_lowers_the_loss_of_the_same_training(rows: Rows, tmp_path: Path) -> None:
    cold = run(rows, tmp_path / "cold", bigram_epochs=0, tokens=300)["held_out_loss"]
    warm = run(rows, tmp_path / "warm", bigram_epochs=60, tokens=300)["held_out_loss"]
    assert all(warm[domain] < cold[domain] - 0.2 for domain in cold)


@pytest.mark.parametrize("tied", [False, True])
def test_the_folder_is_an_ordinary_transformers_model(rows: Rows, tmp_path: Path, tied: bool) -> None:
    logged: list[int] = []
    tokenizer, folder = tiny_tokenizer(), tmp_path / "deep" / "target"
    result = pretrain(tokenizer, rows, rows, tiny(tied=tied), folder, 0, lambda values, step: logged.append(step))
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(parameter.numel() for parameter in model.parameters()) == result["parameters"]
    assert AutoTokenizer.from_pretrained(folder).chat_template == tokenizer.chat_template
    target = Target.load(str(folder))
    assert target.eos_ids == {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|end|>")}
    lines = [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == logged
    assert lines[-1]["step"] == result["steps"]
    assert {"step", "loss", "learning_rate", "tokens_per_second", "memory_gb"} <= set(lines[0])
    assert [place.name for place in folder.parent.iterdir()] == ["target"]


def test_killed_and_continued_the_target_is_bit_equal_to_one_that_was_left_alone(
    rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS 33. Killed at step 9, continued at 8; the warm start is made once. Then killed, and begun anew by another seed."""
    monkeypatch.setattr(module, "CHECKPOINT_EVERY", 4)

    def train(name: str, kill_at: int = 0, seed: int = 0) -> dict[str, Any]:
        def log(values: dict[str, float], step: int) -> None:
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        return pretrain(tiny_tokenizer(), rows, rows, tiny(log_every=1), tmp_path / name, seed, log)

    def killed(name: str) -> int:
        if (pid := os.fork()) == 0:
            train(name, kill_at=9)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def files(name: str) -> list[Any]:
        lines = (tmp_path / name / "training.jsonl").read_text().splitlines()
        return [(tmp_path / name / "model.safetensors").read_bytes(), [json.loads(line)["loss"] for line in lines]]

    whole, other = train("whole"), train("other", seed=1)
    assert killed("parts") == -signal.SIGKILL
    (tmp_path / ".parts.partial" / "training.jsonl").write_bytes(
        b"cut sh"
    )  # as a lost machine leaves what was not flushed
    with monkeypatch.context() as patch:
        patch.setattr(module, "fit_bigrams", lambda *_: pytest.fail("the warm start was made again"))
        parts = train("parts")
    assert files("parts") == files("whole")
    assert (parts["steps"], parts["tokens"]) == (whole["steps"], whole["tokens"])
    assert killed("anew") == -signal.SIGKILL
    train("anew", seed=1)
    assert files("anew") == files("other")
    assert whole["held_out_loss"] != other["held_out_loss"]
    assert sorted(place.name for place in tmp_path.iterdir()) == ["anew", "other", "parts", "rows", "whole"]
    assert not (tmp_path / "parts" / "checkpoints").exists()


def test_a_run_that_breaks_leaves_the_former_target_in_place(
    rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "target"
    run(rows, folder, tokens=100)
    before = (folder / "model.safetensors").read_bytes()

    def breaks(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "held_out_loss", breaks)
    with pytest.raises(KeyboardInterrupt):
        run(rows, folder, seed=9, tokens=100)
    assert (folder / "model.safetensors").read_bytes() == before


def test_a_loss_that_is_not_finite_stops_with_the_step(rows: Rows, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the loss is nan at step \d+; lower the learning rates"):
        run(rows, tmp_path / "target", embedding_lr=1e38, other_lr=1e38, matrix_lr=1e38, clip=0.0)
    assert not (tmp_path / "target").exists()


def test_the_default_shape_has_between_four_and_eight_million_parameters() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(ScratchSettings()))
    assert 4e6 <= sum(parameter.numel() for parameter in model.parameters()) <= 8e6
