"""The peers' heads as heads of ours: names, what is refused, and that the probe notices a difference."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kit import TAPS, tiny_target
from safetensors.torch import load_file, save_file

from draftsmith.errors import UserError
from draftsmith.train.rollout import rollout

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "peers"))
from imported import HEADS, check, imported

from draftsmith.models.eagle import new_eagle_head
from draftsmith.models.vocabulary import DraftVocabulary

STEPS = 3


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def written(peer: str, folder: Path, target):
    """A random head in the peer's layout, the probe of one row made with it, and (its configuration, states)."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = DraftVocabulary(torch.arange(0, target.vocabulary, 2), target.vocabulary)
    config = new_eagle_head(target, TAPS, vocabulary).config
    head = HEADS[peer](config, vocabulary, target)
    for parameter in head.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    states = {
        "offsets": torch.tensor([0, 4, 14]),
        "token_ids": torch.randint(0, target.vocabulary, (14,), generator=generator),
        "taps": torch.randn(14, len(TAPS), target.width, generator=generator),
    }
    with torch.no_grad():
        steps = rollout(head, states["token_ids"][None, 4:], states["taps"][None, 4:], STEPS)
        logits = torch.cat([head.logits(state) for state in steps])
    layer = "midlayer." if peer == "specforge" else "layers.0."
    tensors = {name.replace("layers.0.", layer): value.contiguous() for name, value in head.state_dict().items()}
    tensors |= {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}
    tensors["embed_tokens.weight"] = target.model.get_input_embeddings().weight.detach().clone()
    save_file(tensors, folder / "model.safetensors")
    save_file({"logits": logits, "row": torch.tensor(1)}, folder / "probe.safetensors")
    return config, states


@pytest.mark.parametrize("peer", HEADS)
def test_a_peers_head_gives_the_logits_of_its_own_code_and_a_changed_weight_is_noticed(peer, tmp_path, target):
    config, states = written(peer, tmp_path, target)
    assert check(imported(peer, tmp_path, config, target), tmp_path, states) < 1e-5
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["norm.weight"][0] += 0.01
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="differ"):
        check(imported(peer, tmp_path, config, target), tmp_path, states)


def test_speculators_defaults_are_another_function_than_a_plain_eagle_head(tmp_path, target):
    config, states = written("speculators", tmp_path, target)
    head = imported("speculators", tmp_path, config, target)
    plain = HEADS["specforge"](replace(config, norm_state=True), head.vocabulary, target)
    plain.load_state_dict({name: value for name, value in head.state_dict().items() if name != "input_norm.weight"})
    with pytest.raises(UserError, match="differ"):
        check(plain, tmp_path, states)


@pytest.mark.parametrize(("change", "said"), [("embed_tokens.weight", "embedding"), ("fc.weight", "fc.weight")])
def test_another_embedding_and_a_missing_tensor_are_refused_by_name(change, said, tmp_path, target):
    config, _ = written("specforge", tmp_path, target)
    tensors = load_file(tmp_path / "model.safetensors")
    if change == "fc.weight":
        del tensors[change]
    else:
        tensors[change][3] += 1.0
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=said):
        imported("specforge", tmp_path, config, target)
