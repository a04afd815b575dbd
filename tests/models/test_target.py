"""The target's conventions: last state, taps, head, fingerprint, and what is refused."""

import json

import pytest
import torch
from kit import FLAVOURS, tiny_model, tiny_target, tiny_target_folder, tiny_tokenizer
from safetensors.torch import load_file, save_file

from draftsmith.errors import UserError
from draftsmith.models.target import Target, choose_taps


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_logits_are_those_of_the_model_and_taps_are_block_outputs(flavour):
    target = tiny_target(flavour)
    ids = torch.randint(6, 100, (2, 20))
    out = target.forward(ids, choose_taps(target.blocks))
    reference = target.model(ids, output_hidden_states=True)
    torch.testing.assert_close(out.logits, reference.logits, atol=0, rtol=0)
    for position, tap in enumerate(choose_taps(target.blocks)):
        if tap < target.blocks - 1:  # transformers reports the last block's output after the final norm only
            torch.testing.assert_close(out.taps[:, :, position], reference.hidden_states[tap + 1], atol=0, rtol=0)
    torch.testing.assert_close(out.last, reference.hidden_states[-1], atol=0, rtol=0)


def test_the_last_blocks_output_is_not_the_last_state():
    target = tiny_target("two-blocks")
    out = target.forward(torch.randint(6, 100, (1, 8)), (0, 1))
    assert not torch.allclose(out.taps[:, :, 1], out.last)
    torch.testing.assert_close(target.model.model.norm(out.taps[:, :, 1]), out.last)


@pytest.mark.parametrize("blocks", range(1, 81))
def test_default_taps_are_rising_and_valid_for_every_depth(blocks):
    taps = choose_taps(blocks)
    assert list(taps) == sorted(set(taps))
    assert 0 <= taps[0] <= taps[-1] < blocks
    if blocks >= 8:
        assert taps == (1, blocks // 2 - 1, blocks - 4)  # EAGLE-3's own, written as outputs


@pytest.mark.parametrize("wrong", [[], [1, 1], [2, 1], [-1, 2], [0, 4]])
def test_impossible_taps_are_refused(wrong):
    with pytest.raises(UserError, match="taps"):
        choose_taps(4, wrong)


def test_fingerprint_names_weights_and_tokenizer_but_not_the_folder(tmp_path):
    first = Target.load(tiny_target_folder(tmp_path / "a")).fingerprint()
    assert first == Target.load(tiny_target_folder(tmp_path / "b")).fingerprint()
    model = tiny_model()
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1e-3
    assert Target(model, tiny_tokenizer()).fingerprint() != Target(tiny_model(), tiny_tokenizer()).fingerprint()
    other = tiny_tokenizer(template="{{ messages }}")
    assert Target(tiny_model(), other).fingerprint() != Target(tiny_model(), tiny_tokenizer()).fingerprint()


def test_a_folder_without_weights_or_without_anything_is_one_line(tmp_path):
    folder = tiny_target_folder(tmp_path)
    (folder / "model.safetensors").unlink()
    for path in (folder, tmp_path / "nothing-here"):
        with pytest.raises(UserError) as caught:
            Target.load(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_pickled_weights_are_never_loaded(tmp_path):
    folder = tiny_target_folder(tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save(tiny_model().state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="safetensors"):
        Target.load(folder)


def test_attaching_drafts_leaves_the_targets_weights_alone():
    from draftsmith.models.draft import DraftLM
    from draftsmith.models.eagle import new_eagle_head
    from draftsmith.models.vocabulary import DraftVocabulary

    target = tiny_target()
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    draft = DraftLM.from_target_blocks(target, [0, 3])
    head = new_eagle_head(target, (0, 1, 2), DraftVocabulary.all_of(target.vocabulary))
    with torch.no_grad():
        for parameter in [*draft.model.parameters(), *head.parameters()]:
            parameter.add_(1.0)
    for name, tensor in target.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_an_architecture_whose_logits_are_scaled_in_an_unknown_way_is_refused():
    """`head` must reproduce the model's own logits; if it does not, everything downstream would be wrong without a sign."""
    model = tiny_model()
    forward = model.forward

    def scaled(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = out.logits * 1.1
        return out

    model.forward = scaled
    with pytest.raises(UserError, match="llama"):
        Target(model, tiny_tokenizer())


@pytest.mark.parametrize(
    "damage", ["missing tensor", "more blocks", "fewer blocks", "truncated", "other shape", "LFS pointer"]
)
def test_weights_that_do_not_fit_their_configuration_are_refused_and_never_filled_in(tmp_path, damage):
    folder = tiny_target_folder(tmp_path)
    weights, config = folder / "model.safetensors", folder / "config.json"
    if damage == "missing tensor":
        save_file(
            {k: v for k, v in load_file(weights).items() if "layers.2.mlp.up_proj" not in k}, weights, {"format": "pt"}
        )
    elif damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "LFS pointer":
        weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    else:
        change = {
            "more blocks": ("num_hidden_layers", 6),
            "fewer blocks": ("num_hidden_layers", 3),
            "other shape": ("vocab_size", 99),
        }
        key, value = change[damage]
        config.write_text(json.dumps(json.loads(config.read_text()) | {key: value}))
    with pytest.raises(UserError, match=str(folder)) as caught:
        Target.load(folder)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_larger_than_the_output_head_is_refused(tmp_path):
    with pytest.raises(UserError, match="tokenizer has"):
        Target.load(tiny_target_folder(tmp_path, vocabulary=100))


@pytest.mark.parametrize(
    ("tree_error", "rounding", "accepted"),
    [(0.0012, 0.0002, True), (0.0012, 1e-6, False), (0.006, 0.004, False), (float("nan"), 0.001, False)],
)
def test_what_rounding_does_to_a_models_own_logits_is_no_error_of_its_trees_up_to_a_bound(
    monkeypatch, tree_error, rounding, accepted
):
    model = tiny_model()
    monkeypatch.setattr(Target, "_probe", lambda _target: (0.0, tree_error, rounding))
    if accepted:
        Target(model)
    else:
        with pytest.raises(UserError, match="a branch of a token tree gets other logits than alone"):
            Target(model)


class QuantisedTogether(torch.nn.Linear):
    """Its activations share one scale, so that what one row holds changes the others."""

    def forward(self, x):
        scale = x.abs().max() / 127
        return super().forward((x / scale).round() * scale)


def test_a_model_whose_texts_change_each_other_in_a_batch_is_refused():
    model = tiny_model("plain", initializer_range=0.05)
    for layer in model.model.layers:
        layer.mlp.down_proj.__class__ = QuantisedTogether
    with pytest.raises(UserError, match="a text gets other logits in a batch than alone"):
        Target(model)


def test_the_rounding_of_a_probe_is_seen_and_is_small():
    head_error, tree_error, rounding = tiny_target()._probe()
    assert head_error == 0.0
    assert 0.0 <= rounding < 1e-4
    assert tree_error < 1e-4
