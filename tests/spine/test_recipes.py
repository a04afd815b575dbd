"""The shipped recipes, scaled down: the same YAML with tiny weights of the same architectures, from data to acceptance."""

import json
import random
from importlib import resources
from pathlib import Path

import pytest
import torch
from kit import WORDS, tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.cli import main

FOLDER = Path(str(resources.files("draftsmith.configs")))
#: Recipe, kept shapes of its target and of the checkpoint that its draft starts from, overrides that only scale it.
RECIPES = [
    ("gpt2-124m_draft-30m", "gpt2", None, ["distill.shape={n_embd: 16, n_layer: 1, n_head: 2}"]),
    ("gpt2-medium_gpt2", "gpt2-medium", "gpt2", []),
    ("qwen3-32b_qwen3-0.6b", "qwen3-32b", "qwen3-0.6b", []),
    ("llama3-70b_llama3.2-1b", "llama-3.1-70b-instruct", "llama-3.2-1b-instruct", []),
]
SMALL = {
    **{"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128},
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128},
}


def tiny_weights(folder: Path, shape: str, layers: int, rows: int) -> Path:
    """A model of the kept shape's architecture with tiny sizes; `rows`: its vocabulary, padded as the two models' are."""
    kept = json.loads((FOLDER / "shapes" / f"{shape}.json").read_text(encoding="utf-8"))["config"]
    sizes = {key: SMALL.get(key, value) for key, value in kept.items()}
    depth = "n_layer" if "n_layer" in kept else "num_hidden_layers"
    sizes |= {"vocab_size": rows, "bos_token_id": 0, "eos_token_id": 0, depth: layers, "initializer_range": 0.2}
    with torch.random.fork_rng():
        torch.manual_seed(layers)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("recipe", "target", "start", "changes"), RECIPES, ids=[recipe for recipe, *_ in RECIPES])
def test_each_recipe_runs_scaled_down_and_the_draft_learns(tmp_path, recipe, target, start, changes):
    rng = random.Random(0)
    texts = [" ".join(rng.choice(WORDS) for _ in range(30)) for _ in range(60)]
    chats = [[{"role": "user", "content": "say it"}, {"role": "assistant", "content": text[:60]}] for text in texts]
    (tmp_path / "prose.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    domains = ["prose"] if recipe.startswith("gpt2") else ["chat", "code"]
    files = {"prose": "prose.jsonl", "code": "prose.jsonl", "chat": "chat.jsonl"}
    sources = [{"kind": "json", "path": str(tmp_path / files[domain]), "domain": domain} for domain in domains]
    overrides = [
        f"run_root={tmp_path}",
        f"data.sources={json.dumps(sources)}",
        "data.max_length=64",
        "data.held_out=0.2",
        f"data.train_tokens={json.dumps(dict.fromkeys(domains, 1500))}",
        f"data.held_out_tokens={json.dumps(dict.fromkeys(domains, 600))}",
        f"target.path={tiny_weights(tmp_path / 'target', target, 4, 160)}",
        "target.dtype=float32",
        *(
            f"distill.{name}"
            for name in (
                "tokens=6000",
                "batch_tokens=256",
                "accumulate=1",
                "held_out_rows=3",
                "matrix_lr=0.02",
                "other_lr=0.01",
            )
        ),
        *(f"evaluation.{name}" for name in ("prompts=2", "prompt_tokens=12", "max_new_tokens=8", "timed_prompts=0")),
        "tracking.trackers=[]",
        *changes,
    ]
    if start is not None:
        overrides.append(f"distill.checkpoint={tiny_weights(tmp_path / 'start', start, 2, 152)}")
    with pytest.raises(SystemExit) as ended:
        main(["eval-acceptance", str(FOLDER / f"{recipe}.yaml"), *overrides])
    assert ended.value.code in (0, None)
    lines = (tmp_path / recipe / "draft" / "training.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses[-1] < losses[0]
    results = json.loads((tmp_path / recipe / "eval" / "distilled.json").read_text())["results"]
    assert {entry["domain"] for entry in results} == set(domains)
    assert all(entry["identical"][0] == entry["identical"][1] for entry in results if entry["temperature"] == 0)
