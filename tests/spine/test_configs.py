"""The shipped configs: each is valid, and `plan` says what it needs without weights and without a network."""

import re
from collections import namedtuple
from importlib import resources
from pathlib import Path

import huggingface_hub.constants
import pytest
from rich.console import Console

from draftsmith import plan
from draftsmith.config import load_config
from draftsmith.errors import UserError

FOLDER = Path(str(resources.files("draftsmith.configs")))
# Millions of parameters, target and draft, as the model cards state them (Qwen3-0.6B: 0.6 B, the tied head counted once).
PUBLISHED = {
    "gpt2-124m_draft-30m": (124, 30),
    "gpt2-medium_gpt2": (355, 124),
    "qwen3-32b_qwen3-0.6b": (32_800, 600),
    "llama3-70b_llama3.2-1b": (70_600, 1_240),
}
Disk = namedtuple("Disk", "total used free")


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No network, an empty hub cache, and a disk of 100 TB."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    plan._hub_answers.cache_clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda _path: Disk(10**14, 0, 10**14))
    monkeypatch.setattr(plan, "Console", lambda: Console(width=200))
    yield
    plan._hub_answers.cache_clear()


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.yaml")))
def test_every_config_is_valid(name):
    assert load_config(FOLDER / f"{name}.yaml").config.name in (name, "demo", "demo-tiny")


def test_the_sweep_over_temperatures_reuses_a_finished_demo():
    """All that the demo's stages but the evaluation depend on is the same."""
    demo, sweep = (load_config(FOLDER / f"{name}.yaml").config for name in ("demo", "temperatures"))
    assert demo.model_dump(exclude={"name", "evaluation"}) == sweep.model_dump(exclude={"name", "evaluation"})
    assert (sweep.evaluation.drafting, max(sweep.evaluation.temperatures)) == ("both", 2.0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_plan_without_a_network_gives_the_published_parameters_and_the_cache_size(name, offline, capsys, tmp_path):
    config = load_config(FOLDER / f"{name}.yaml", [f"run_root={tmp_path}"]).config
    plan.print_plan(config)
    said = capsys.readouterr().out
    assert re.search(r"hub cannot be reached; its published sizes are taken from configs/shapes/", said)
    for model, millions in zip(("target", "distilled"), PUBLISHED[name], strict=True):
        count = int(re.search(rf"{model} +│ +([\d,]+)", said)[1].replace(",", ""))
        assert count == pytest.approx(millions * 1e6, rel=0.02)
    tokens = sum(config.data.train_tokens.values())
    assert f"{tokens:,} tokens" in said
    megabytes = float(re.search(r"rows, ([\d,.]+) MB", said)[1].replace(",", ""))
    assert tokens * 5 < megabytes * 1e6 < tokens * (8 * config.cache.k + 64)


def test_an_address_of_the_hub_that_is_none_counts_as_no_answer(offline, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "hub.example.org")
    assert not plan._hub_answers()


def test_a_hub_name_without_an_answer_and_without_a_kept_shape_is_refused_in_one_line(offline, tmp_path):
    config = load_config(
        FOLDER / "gpt2-medium_gpt2.yaml", [f"run_root={tmp_path}", "target.path=nobody/nothing"]
    ).config
    with pytest.raises(
        UserError, match=r"nobody/nothing: no configuration of it \(the hub cannot be reached"
    ) as caught:
        plan.print_plan(config)
    assert "\n" not in str(caught.value)
