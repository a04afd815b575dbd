"""The descriptions of the engines' layouts, and the checker that holds a folder against them.

Shapes are counted here by hand for one small head per layout, so that an error in the descriptions shows.
"""

import json

import pytest
import torch
from exports import half_of, saved
from kit import tiny_target
from safetensors.torch import load_file, save_file

from draftsmith.models.medusa import new_medusa_heads
from draftsmith.models.serving.check import check_folder
from draftsmith.models.serving.export import export_draft
from draftsmith.models.serving.layouts import LAYOUTS, expand
from draftsmith.models.vocabulary import DraftVocabulary

# W = H = 32, V = 150, D = 75, three taps, 4 heads of 8 on 2 key-value heads, I = 64.
LAYER = {
    "self_attn.q_proj.weight": (32, 64),
    "self_attn.k_proj.weight": (16, 64),
    "self_attn.v_proj.weight": (16, 64),
    "self_attn.o_proj.weight": (32, 32),
    "post_attention_layernorm.weight": (32,),
    "mlp.gate_proj.weight": (64, 32),
    "mlp.up_proj.weight": (64, 32),
    "mlp.down_proj.weight": (32, 64),
    "input_layernorm.weight": (32,),
    "hidden_norm.weight": (32,),
}
ENDS = {"fc.weight": (32, 96), "norm.weight": (32,), "lm_head.weight": (75, 32), "d2t": (75,), "t2d": (150,)}


def a_folder(tmp_path, fmt, kind, **options):
    target = tiny_target()
    if kind == "medusa":
        new_medusa_heads(target, DraftVocabulary.all_of(target.vocabulary), 2).save(tmp_path / "head")
    else:
        saved(tmp_path / "head", target, half_of(target) if kind == "eagle3" else None, kind=kind, **options)
    return export_draft(tmp_path / "head", target, fmt, tmp_path / "out")


def shapes(folder):
    return {name: tuple(value.shape) for name, value in load_file(folder / "model.safetensors").items()}


@pytest.mark.parametrize("fmt", ["vllm", "sglang", "trtllm", "speculators"])
def test_an_eagle_3_head_has_exactly_these_tensors(tmp_path, fmt):
    first = "layers.0" if fmt == "speculators" else "midlayer"
    assert shapes(a_folder(tmp_path, fmt, "eagle3")) == ENDS | {
        f"{first}.{name}": shape for name, shape in LAYER.items()
    }


@pytest.mark.parametrize(
    ("fmt", "norm"), [("vllm", "input_layernorm"), ("sglang", "hidden_norm"), ("trtllm", "hidden_norm")]
)
def test_a_second_layer_is_normed_where_its_engine_looks(tmp_path, fmt, norm):
    """Both engines would leave the other name's parameter at its start value, or never read it."""
    found = shapes(a_folder(tmp_path, fmt, "eagle3", layers=2))
    assert found[f"layers.1.{norm}.weight"] == (32,)
    assert found["layers.1.self_attn.q_proj.weight"] == (32, 32)
    norms = {name for name in found if name.startswith("layers.1.") and "norm" in name}
    assert norms == {f"layers.1.{norm}.weight", "layers.1.post_attention_layernorm.weight"}


@pytest.mark.parametrize(("fmt", "bias"), [("vllm", {}), ("sglang", {"fc.bias": (32,)})])
def test_an_eagle_1_head_has_no_norms_of_its_own_and_in_sglang_a_bias(tmp_path, fmt, bias):
    of_layer = {
        name: shape for name, shape in LAYER.items() if name not in ("input_layernorm.weight", "hidden_norm.weight")
    }
    of_layer |= {f"self_attn.{part}_proj.weight": (size, 32) for part, size in (("q", 32), ("k", 16), ("v", 16))}
    wanted = {f"layers.0.{name}": shape for name, shape in of_layer.items()} | {"fc.weight": (32, 64)} | bias
    folder = a_folder(tmp_path, fmt, "eagle1")
    assert shapes(folder) == wanted
    if bias:
        assert not load_file(folder / "model.safetensors")["fc.bias"].any()


@pytest.mark.parametrize(("fmt", "kind"), sorted(LAYOUTS))
def test_the_checker_names_each_tensor_that_is_missing_extra_misshapen_or_of_another_type(tmp_path, fmt, kind):
    """FAULTS 44."""
    folder = a_folder(tmp_path, fmt, kind)
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    assert check_folder(folder, fmt, kind, 4) == []
    for name, value in tensors.items():
        for changed, said in (
            ({k: v for k, v in tensors.items() if k != name}, f"{name}: missing"),
            ({**tensors, name: value[:-1]}, f"{name}: shape"),
            ({**tensors, name: torch.ones(value.shape, dtype=torch.int32)}, f"{name}: type int32"),
        ):
            save_file({key: item.contiguous() for key, item in changed.items()}, weights)
            assert any(line.startswith(said) for line in check_folder(folder, fmt, kind, 4)), (name, said)
    save_file({**tensors, "model.fc.weight": torch.ones(1)}, weights)
    assert "model.fc.weight: not of this layout" in check_folder(folder, fmt, kind, 4)


@pytest.mark.parametrize(("fmt", "kind"), sorted(LAYOUTS))
def test_the_checker_names_each_key_that_is_missing_or_wrong(tmp_path, fmt, kind):
    folder, layout = a_folder(tmp_path, fmt, kind), LAYOUTS[fmt, kind]
    config = json.loads((folder / "config.json").read_text())

    def check(changed):
        (folder / "config.json").write_text(json.dumps(changed))
        return " ".join(check_folder(folder, fmt, kind, 4))

    for key in (*layout.keys, *layout.values):
        assert key in check({k: v for k, v in config.items() if k != key}), key
    for key in layout.values:
        assert f"{key} is 'wrong'" in check(config | {key: "wrong"})
    for key in layout.absent:
        assert f"{key} must not be there" in check(config | {key: True})
    assert "states" in check(config | {"dtype": "bfloat16"})
    if kind == "eagle3":
        ids = "eagle_aux_hidden_state_layer_ids"
        for wrong in ([0, 1, 2], [3, 2, 1], [1, 2], [3, 4, 5]):
            assert ids in check(config | {ids: wrong})
        if layout.nested:
            inner = config[layout.nested]
            for key in layout.nested_keys:
                assert key in check(config | {layout.nested: {k: v for k, v in inner.items() if k != key}})
        else:
            shifted = config["eagle_config"] | {ids: [1, 2, 3]}
            assert "one less" in check(config | {"eagle_config": shifted})
            assert "target_hidden_size" in check(config | {"target_hidden_size": config["hidden_size"]})
        (folder / "config.json").write_text(json.dumps(config))
        tensors = load_file(folder / "model.safetensors")
        save_file({**tensors, "d2t": tensors["d2t"] + torch.arange(75)}, folder / "model.safetensors")
        assert "absolute ids are no offsets" in " ".join(check_folder(folder, fmt, kind, 4))


def test_every_layout_says_from_which_file_of_which_version_it_was_read():
    versions = {
        "vllm": "vllm 0.32.0",
        "sglang": "sglang 0.5.23",
        "trtllm": "TensorRT-LLM 00679c66",
        "speculators": "speculators 0.9.0",
    }
    for (fmt, _), layout in LAYOUTS.items():
        assert any(source.startswith(versions[fmt]) for source in layout.sources)
        assert all("/" in source and ": " in source for source in layout.sources)


def test_flags_and_numbers_add_just_their_tensors():
    sizes = {"W": 2, "H": 2, "V": 5, "D": 3, "A": 3, "Q": 2, "KV": 2, "I": 4, "layers": 1}
    layout = LAYOUTS["vllm", "eagle3"]
    plain = set(expand(layout, sizes, {}))
    assert set(expand(layout, sizes, {"fc_norm": True})) - plain == {f"fc_norm.{i}.weight" for i in range(3)}
    assert set(expand(layout, sizes, {"norm_before_fc": True})) - plain == {"input_norm.weight"}
    assert set(expand(layout, sizes, {"pruned": True})) - plain == {"d2t", "t2d"}
    assert expand(layout, sizes, {"norm_before_fc": True})["input_norm.weight"].shape == (6,)
