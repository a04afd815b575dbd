"""Heads that other projects' own code wrote (`tests/fixtures/heads/make.py`) compute here what they computed there."""

import json
from pathlib import Path

import pytest
import torch
from kit import tiny_model, tiny_tokenizer
from safetensors.torch import load_file

from draftsmith.models.eagle import EagleHead
from draftsmith.models.serving.importing import import_draft
from draftsmith.models.target import Target
from draftsmith.train.rollout import rollout

HEADS = Path(__file__).parents[2] / "fixtures" / "heads"
WRITERS = ("speculators", "speculators-residual", "specforge-sglang", "specforge-hf")


def target_of(folder: Path) -> Target:
    """A target of the head's sizes with the embedding that it was made with."""
    config = json.loads((folder / "config.json").read_text())
    inner = config.get("transformer_layer_config", config)
    shape = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": inner["hidden_size"]}
    model = tiny_model(vocabulary=inner["vocab_size"], **shape)
    source = next(
        path for path in (HEADS / f"{folder.name}.embedding.safetensors", folder / "model.safetensors") if path.exists()
    )
    model.get_input_embeddings().weight.data.copy_(load_file(source)["embed_tokens.weight"].float())
    return Target(model, tiny_tokenizer())


@pytest.mark.parametrize("writer", WRITERS)
def test_an_imported_head_gives_its_writers_own_logits_at_every_step(tmp_path, writer):
    target, expected = target_of(HEADS / writer), load_file(HEADS / f"{writer}.expected.safetensors")
    done = import_draft(HEADS / writer, target, tmp_path / "head")
    head = EagleHead.load(done.path, target)
    assert head.config.taps == (0, 1, 2)
    assert head.config.norm_residual == (writer == "speculators-residual")
    tokens, K = expected["tokens"], len(expected["logits"])
    features = expected["features"].unflatten(-1, (3, head.config.target_width))
    with torch.no_grad():  # the first token of a text is joined by no slot
        states = list(
            rollout(head, torch.cat([torch.zeros(1, dtype=torch.long), tokens])[None], features_for(features), K)
        )
        found = torch.stack([head.logits(state)[0] for state in states])
    whole = len(tokens) - K  # later slots read past the end, which each project pads in its own way
    torch.testing.assert_close(found[:, :whole], expected["logits"][:, :whole], atol=1e-4, rtol=1e-4)


def features_for(features: torch.Tensor) -> torch.Tensor:
    """[T, A, W] → [1, T + 1, A, W], a row that is one token longer."""
    return torch.cat([features, features[-1:]])[None]
