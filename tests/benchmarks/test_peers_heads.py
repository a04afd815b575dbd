"""The peers' heads as heads of ours: the probe of a peer's own code notices every difference."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kit import TAPS, tiny_target
from safetensors.torch import save_file

from draftsmith.errors import UserError
from draftsmith.models.eagle import EagleHead, new_eagle_head
from draftsmith.models.vocabulary import DraftVocabulary
from draftsmith.train.rollout import rollout

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "peers"))
from imported import check

STEPS, FLAGS = 3, {"norm_joined": True, "norm_residual": True, "norm_state": True}  # speculators' defaults


@pytest.fixture
def probed(tmp_path):
    """A random head with speculators' norms, a folder with the probe of one row made with it, and the states of two rows."""
    generator, target = torch.Generator().manual_seed(0), tiny_target()
    vocabulary = DraftVocabulary(torch.arange(0, target.vocabulary, 2), target.vocabulary)
    head = new_eagle_head(target, TAPS, vocabulary, **FLAGS)
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
    logits[:, -1] = 7.0  # behind the row's end, where sides may differ
    save_file({"logits": logits, "row": torch.tensor(1)}, tmp_path / "probe.safetensors")
    return head, tmp_path, states, target


def test_a_head_that_computes_what_its_probe_says_passes_and_a_changed_weight_does_not(probed):
    head, folder, states, _ = probed
    assert check(head, folder, states) < 1e-5
    head.norm.weight.data[0] += 0.01
    with pytest.raises(UserError, match="differ"):
        check(head, folder, states)


@pytest.mark.parametrize("flag", ["norm_residual", "norm_state"])
def test_each_of_the_recipes_norms_is_noticed_where_it_is_missing(flag, probed):
    head, folder, states, target = probed
    other = EagleHead(replace(head.config, **{flag: False}), head.vocabulary, target)
    other.load_state_dict(head.state_dict())
    with pytest.raises(UserError, match="differ"):
        check(other, folder, states)
