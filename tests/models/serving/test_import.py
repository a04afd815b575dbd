"""Imports: every export comes back bit for bit, other projects' layouts are understood, and what is wrong is named."""

import json
import re
from pathlib import Path

import pytest
import torch
from exports import half_of, saved, trainers_logits
from kit import TAPS, tiny_target
from safetensors.torch import load_file, save_file

from draftsmith.errors import UserError
from draftsmith.models.eagle import EagleHead
from draftsmith.models.medusa import MedusaHeads, new_medusa_heads
from draftsmith.models.serving.export import export_draft
from draftsmith.models.serving.importing import import_draft
from draftsmith.models.vocabulary import DraftVocabulary

FORMATS_OF = {"eagle3": ("vllm", "sglang", "trtllm", "speculators"), "eagle1": ("vllm", "sglang"), "medusa": ("vllm",)}
NESTED = "eagle_aux_hidden_state_layer_ids"


def rewritten(folder: Path, change_config=lambda config: None, change=lambda tensors: tensors) -> Path:
    """The folder with its configuration and tensors changed in place."""
    config = json.loads((folder / "config.json").read_text())
    change_config(config)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("flavour", ["padded-vocab", "tied"])
@pytest.mark.parametrize("pruned", [False, True], ids=["full", "pruned"])
@pytest.mark.parametrize("fmt", FORMATS_OF["eagle3"])
def test_an_eagle_3_head_comes_back_from_each_format_bit_for_bit(tmp_path, fmt, pruned, flavour):
    """FAULTS 48, 43: export, import, equal tensors, configuration and logits; the mapping is kept."""
    target = tiny_target(flavour)
    head = saved(
        tmp_path / "head", target, half_of(target) if pruned else None, layers=2, norm_taps=True, norm_state=True
    )
    export_draft(tmp_path / "head", target, fmt, tmp_path / "out")
    assert import_draft(tmp_path / "out", target, tmp_path / "back").kind == "eagle3"
    source, found = (load_file(tmp_path / name / "model.safetensors") for name in ("head", "back"))
    assert source.keys() == found.keys()
    assert all(torch.equal(value, source[name]) for name, value in found.items())
    back = EagleHead.load(tmp_path / "back", target)
    assert back.config == head.config
    ids = torch.randint(6, 100, (12,))
    assert torch.equal(trainers_logits(back, target, ids, 3), trainers_logits(head, target, ids, 3))


@pytest.mark.parametrize("flavour", ["plain", "tied"])
@pytest.mark.parametrize("kind", ["eagle1", "medusa"])
def test_other_heads_come_back_bit_for_bit(tmp_path, kind, flavour):
    """FAULTS 48 for the kinds that have the target's whole vocabulary."""
    target = tiny_target(flavour)
    if kind == "eagle1":
        saved(tmp_path / "head", target, kind="eagle1", layers=2)
    else:
        new_medusa_heads(target, DraftVocabulary.all_of(target.vocabulary), 3).save(tmp_path / "head")
    for fmt in FORMATS_OF[kind]:
        export_draft(tmp_path / "head", target, fmt, tmp_path / fmt)
        import_draft(tmp_path / fmt, target, tmp_path / f"{fmt} back")
        source, found = (load_file(tmp_path / name / "model.safetensors") for name in ("head", f"{fmt} back"))
        assert source.keys() == found.keys()
        assert all(torch.equal(value, source[name]) for name, value in found.items())
        load = EagleHead.load if kind == "eagle1" else MedusaHeads.load
        own, back = load(tmp_path / "head", target), load(tmp_path / f"{fmt} back", target)
        assert back.config == own.config
        if kind == "eagle1":
            ids = torch.randint(6, 100, (12,))
            assert torch.equal(trainers_logits(back, target, ids, 3), trainers_logits(own, target, ids, 3))
        else:
            last = torch.randn(5, target.width)
            for k in range(3):
                assert torch.equal(back.logits(back.state(last, k), k), own.logits(own.state(last, k), k))


@pytest.mark.parametrize("flag", ["norm_joined", "norm_residual", "norm_taps", "norm_state"])
def test_each_flag_comes_back(tmp_path, flag):
    """FAULTS 45."""
    target = tiny_target()
    head = saved(tmp_path / "head", target, **{flag: True})
    for fmt in ("vllm", "speculators"):
        export_draft(tmp_path / "head", target, fmt, tmp_path / fmt)
        import_draft(tmp_path / fmt, target, tmp_path / f"{fmt} back")
        assert EagleHead.load(tmp_path / f"{fmt} back", target).config == head.config


@pytest.mark.parametrize("kind", ["eagle3", "eagle1", "medusa"])
def test_each_missing_extra_or_misshapen_tensor_is_named_as_the_folder_spells_it(tmp_path, kind):
    """FAULTS 44."""
    target = tiny_target()
    if kind == "medusa":
        new_medusa_heads(target, DraftVocabulary.all_of(target.vocabulary), 2).save(tmp_path / "head")
    else:
        saved(tmp_path / "head", target, half_of(target) if kind == "eagle3" else None, kind=kind)
    folder = export_draft(tmp_path / "head", target, "vllm", tmp_path / "out")
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    optional = {
        "t2d",
        "lm_head.weight",
        *(f"blocks.{i}.layers.0.bias" for i in range(2)),
        "fc.bias",
    }  # have a known value
    for name in sorted(tensors.keys() - optional):
        save_file({key: value for key, value in tensors.items() if key != name}, weights)
        with pytest.raises(UserError, match=re.escape(name)):
            import_draft(folder, target, tmp_path / "x")
        save_file({**tensors, name: torch.cat([tensors[name], tensors[name][:1]])}, weights)
        with pytest.raises(UserError, match=re.escape(name)):
            import_draft(folder, target, tmp_path / "x")
    save_file({**tensors, "fc2.weight": torch.zeros(2, 2)}, weights)
    with pytest.raises(UserError, match=r"fc2\.weight: not of this layout"):
        import_draft(folder, target, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def safeailab(folder: Path, target) -> dict:
    """A folder as SafeAILab's EAGLE-3 trainer leaves it: no ids, no flags, RoPE in old keys, embedding included."""
    config = json.loads((folder / "config.json").read_text())
    for key in (
        NESTED,
        "eagle_config",
        "num_aux_hidden_states",
        "rope_parameters",
        "dtype",
        "norm_before_residual",
        "fc_norm",
    ):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config))
    return config


def test_safeailabs_eagle_3_folder_has_the_default_taps_and_the_targets_embedding(tmp_path):
    target = tiny_target(num_hidden_layers=8)
    head = saved(tmp_path / "head", target, half_of(target), taps=(1, 3, 4))
    folder = export_draft(tmp_path / "head", target, "sglang", tmp_path / "out")
    safeailab(folder, target)
    embedding = target.model.get_input_embeddings().weight
    rewritten(folder, change=lambda tensors: tensors | {"embed_tokens.weight": embedding.detach().to(torch.bfloat16)})
    done = import_draft(folder, target, tmp_path / "back")
    assert EagleHead.load(done.path, target).config == head.config
    assert any("default was taken" in note for note in done.notes)
    rewritten(folder, change=lambda tensors: tensors | {"embed_tokens.weight": embedding.detach() + 0.1})
    with pytest.raises(UserError, match=r"embed_tokens\.weight differs from the target's embedding"):
        import_draft(folder, target, tmp_path / "other")


def test_safeailabs_eagle_1_folder_has_a_bias_that_was_trained(tmp_path):
    target = tiny_target()
    head = saved(tmp_path / "head", target, kind="eagle1", fc_bias=True)
    folder = export_draft(tmp_path / "head", target, "sglang", tmp_path / "out")
    rewritten(folder, lambda config: config.update({"bias": True, "architectures": ["LlamaForCausalLM"]}))
    import_draft(folder, target, tmp_path / "back")
    back = EagleHead.load(tmp_path / "back", target)
    assert back.config == head.config
    assert torch.equal(back.fc.bias, head.fc.bias)


def test_an_id_means_what_the_layout_that_wrote_it_means(tmp_path):
    target = tiny_target()
    head = saved(tmp_path / "head", target, taps=(1, 2))
    folder = export_draft(tmp_path / "head", target, "vllm", tmp_path / "out")
    import_draft(folder, target, tmp_path / "both")
    rewritten(folder, lambda config: config.pop(NESTED))
    import_draft(folder, target, tmp_path / "nested")
    import_draft(folder, target, tmp_path / "as vllm reads it", nested_ids="input")
    taps = [EagleHead.load(tmp_path / name, target).config.taps for name in ("both", "nested", "as vllm reads it")]
    assert taps == [head.config.taps, head.config.taps, (0, 1)]
    for ids in ([0, 1], [2, 2], [4, 5]):
        rewritten(folder, lambda config, ids=ids: config.update({NESTED: ids}))
        with pytest.raises(UserError, match="no distinct outputs"):
            import_draft(folder, target, tmp_path / "x")


def test_absolute_ids_in_d2t_another_t2d_or_another_size_are_refused(tmp_path):
    target = tiny_target()
    saved(tmp_path / "head", target, half_of(target))
    folder = export_draft(tmp_path / "head", target, "vllm", tmp_path / "out")
    tensors = load_file(folder / "model.safetensors")
    ids = half_of(target).target_ids
    for name, value, said in (
        ("d2t", ids, "absolute ids are no offsets"),
        ("t2d", ~tensors["t2d"], "t2d: is not true exactly"),
        ("t2d", tensors["t2d"][:-1], "t2d: shape"),
        ("d2t", tensors["d2t"][:-1], "d2t: shape"),
    ):
        save_file({**tensors, name: value}, folder / "model.safetensors")
        with pytest.raises(UserError, match=said):
            import_draft(folder, target, tmp_path / "x")


def test_without_an_output_head_the_targets_rows_become_the_heads_own(tmp_path):
    target, half = tiny_target("tied"), half_of(tiny_target("tied"))
    saved(tmp_path / "head", target, half)
    folder = export_draft(tmp_path / "head", target, "vllm", tmp_path / "out")
    rewritten(folder, change=lambda tensors: {k: v for k, v in tensors.items() if k != "lm_head.weight"})
    done = import_draft(folder, target, tmp_path / "back")
    rows = target.model.get_output_embeddings().weight[half.target_ids]
    assert torch.equal(EagleHead.load(done.path, target).lm_head.weight, rows)
    assert any("no lm_head" in note for note in done.notes)


def test_what_our_head_cannot_compute_is_refused_by_name(tmp_path):
    """FAULTS 47 for somebody else's configuration; test_eagle.py has it for ours."""
    target = tiny_target()
    saved(tmp_path / "head", target)
    folder = export_draft(tmp_path / "head", target, "vllm", tmp_path / "out")
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    for name in ("midlayer.self_attn.q_norm.weight", "mask_hidden", "midlayer.self_attn.q_proj.bias"):
        save_file({**tensors, name: torch.ones(8)}, folder / "model.safetensors")
        with pytest.raises(UserError, match=re.escape(name)):
            import_draft(folder, target, tmp_path / "x")
    save_file(tensors, folder / "model.safetensors")
    for change, said in (
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"hidden_size": 16}, "hidden_size 16"),
        ({"vocab_size": 9}, "vocab_size 9"),
        ({"num_attention_heads": 3}, "impossible shape"),
        ({"speculators_model_type": "dflash"}, "dflash"),
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UserError, match=said):
            import_draft(folder, target, tmp_path / "x")
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "intermediate_size"}))
    with pytest.raises(UserError, match="intermediate_size"):
        import_draft(folder, target, tmp_path / "x")


def test_a_speculators_folder_that_leaves_its_residual_open_is_refused(tmp_path):
    target = tiny_target()
    saved(tmp_path / "head", target)
    folder = export_draft(tmp_path / "head", target, "speculators", tmp_path / "out")
    rewritten(folder, lambda config: config.pop("norm_before_residual"))
    with pytest.raises(UserError, match="norm_before_residual is missing"):
        import_draft(folder, target, tmp_path / "x")


def test_pickles_are_refused_with_the_remedy_and_never_read(tmp_path):
    target = tiny_target()
    saved(tmp_path / "head", target)
    folder = export_draft(tmp_path / "head", target, "vllm", tmp_path / "out")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n.")
    with pytest.raises(UserError, match=r"pytorch_model\.bin: a pickle.*convert it to"):
        import_draft(folder, target, tmp_path / "x")


def test_medusas_own_names_are_understood_and_a_missing_bias_is_zero(tmp_path):
    target = tiny_target()
    heads = new_medusa_heads(target, DraftVocabulary.all_of(target.vocabulary), 2)
    torch.nn.init.normal_(heads.blocks[1].weight)
    folder = tmp_path / "medusa"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1, "vocab_size": target.vocabulary})
    )
    old = {f"{i}.0.linear.weight": heads.blocks[i].weight.data for i in range(2)}
    save_file(
        old | {f"{i}.1.weight": heads.lm_heads[i].weight.data.clone() for i in range(2)}, folder / "medusa.safetensors"
    )
    done = import_draft(folder, target, tmp_path / "back")
    back = MedusaHeads.load(done.path, target)
    last = torch.randn(3, target.width)
    assert all(
        torch.equal(back.logits(back.state(last, k), k), heads.logits(heads.state(last, k), k)) for k in range(2)
    )
    assert len(done.notes) == 2


def test_our_own_heads_ordinary_models_and_full_folders_need_no_import(tmp_path):
    target = tiny_target()
    saved(tmp_path / "head", target)
    with pytest.raises(UserError, match="already"):
        import_draft(tmp_path / "head", target, tmp_path / "x")
    target.model.save_pretrained(tmp_path / "lm")
    with pytest.raises(UserError, match="an ordinary LM needs no import"):
        import_draft(tmp_path / "lm", target, tmp_path / "x")
    folder = export_draft(tmp_path / "head", target, "vllm", tmp_path / "out")
    with pytest.raises(UserError, match="is not empty"):
        import_draft(folder, target, tmp_path / "head")
    assert EagleHead.load(tmp_path / "head", target).config.taps == TAPS


@pytest.mark.parametrize(("key", "value"), [("num_attention_heads", 0), ("head_dim", -32)])
def test_a_value_that_no_layer_can_have_is_refused_in_one_line(tmp_path, key, value):
    target = tiny_target()
    saved(tmp_path / "head", target)
    folder = export_draft(tmp_path / "head", target, "vllm", tmp_path / "out")
    rewritten(folder, lambda config: config.update({key: value}))
    with pytest.raises(UserError) as caught:
        import_draft(folder, target, tmp_path / "back")
    assert "\n" not in str(caught.value)


def test_nan_weights_and_a_two_dimensional_d2t_are_refused(tmp_path):
    target = tiny_target()
    saved(tmp_path / "head", target, half_of(target))
    folder = export_draft(tmp_path / "head", target, "vllm", tmp_path / "out")
    tensors = load_file(folder / "model.safetensors")
    for name, value, message in (
        ("fc.weight", tensors["fc.weight"] * float("nan"), "NaN"),
        ("d2t", tensors["d2t"][:, None], "shape"),
    ):
        save_file(tensors | {name: value.contiguous()}, folder / "model.safetensors")
        with pytest.raises(UserError, match=message):
            import_draft(folder, target, tmp_path / "back")


def refusal(folder: Path, target, out: Path) -> str:
    """What an import says when it refuses: one line that names the folder."""
    with pytest.raises(UserError) as caught:
        import_draft(folder, target, out)
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith(f"{folder}"), said
    assert not out.exists()
    return said


def test_a_value_that_means_nothing_is_refused_by_the_name_of_its_field(tmp_path):
    """Not taken for true, for a default or for something that a library makes of it."""
    target = tiny_target()
    saved(tmp_path / "head", target)
    folder = export_draft(tmp_path / "head", target, "vllm", tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    for change in (
        {"max_position_embeddings": "big"},
        {"rms_norm_eps": None},
        {"rms_norm_eps": "1e-6"},
        {"norm_before_residual": "yes"},
        {"fc_norm": []},
        {"norm_output": 0},
        {"num_hidden_layers": True},
        {"num_hidden_layers": 10**6},
        {"num_key_value_heads": 10**30},
        {"rope_parameters": "x"},
        {"rope_parameters": {"rope_type": "garbage"}},
        {"rope_theta": 5e5},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"architectures": "LlamaForCausalLMEagle3"},
        {"architectures": ["Garbage"]},
        {"eagle_config": [1]},
        {"eagle_aux_hidden_state_layer_ids": ["1"]},
        {"num_aux_hidden_states": 2},
        {"draft_vocab_size": "x"},
        {"quantization_config": {"quant_method": "fp8"}},
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        assert next(iter(change)) in refusal(folder, target, tmp_path / "x")
    for content in (b'{"a":' * 100_000, b"[]", b"\xef\xbb\xbf{}", '{"a": 1}'.encode("utf-16")):
        (folder / "config.json").write_bytes(content)
        assert "config.json" in refusal(folder, target, tmp_path / "x")
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    assert "not readable" in refusal(folder, target, tmp_path / "x")


def test_weights_that_are_not_what_they_seem_are_refused(tmp_path):
    target = tiny_target()
    saved(tmp_path / "head", target, half_of(target))
    folder = export_draft(tmp_path / "head", target, "vllm", tmp_path / "out")
    weights, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    tensors = load_file(weights)
    for change, said in (
        ({"fc.weight": tensors["fc.weight"].to(torch.float8_e4m3fn)}, "fc.weight is stored as float8_e4m3fn"),
        ({"d2t": tensors["d2t"].float()}, "d2t: type"),
        ({"bad\nname\x1b[31m": torch.ones(2)}, r"bad\nname\x1b[31m: not of this layout"),
        ({f"{i}" * 200: torch.ones(2) for i in range(30)}, "22 more"),
    ):
        save_file(tensors | change, weights)
        assert said in (text := refusal(folder, target, tmp_path / "x"))
        assert len(text) < 3000
    save_file(
        {name: value for name, value in tensors.items() if name != "d2t"} | {"t2d": tensors["t2d"] & False}, weights
    )
    whole = config | {"draft_vocab_size": target.vocabulary}
    (folder / "config.json").write_text(json.dumps(whole))
    assert "t2d: not true everywhere" in refusal(folder, target, tmp_path / "x")


def test_an_index_says_which_files_there_must_be(tmp_path):
    target = tiny_target()
    saved(tmp_path / "head", target)
    folder = export_draft(tmp_path / "head", target, "vllm", tmp_path / "out")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {name: f"model-0000{1 + (name > 'midlayer.n')}-of-00002.safetensors" for name in tensors}
    for file in set(names.values()):
        save_file({name: tensors[name] for name in names if names[name] == file}, folder / file)
    index = folder / "model.safetensors.index.json"
    for said, problem in (
        ([1], "holds no object"),
        ({"weight_map": {"fc.weight": 1}}, "no object of file names"),
        (
            {"weight_map": names | {"fc.weight": "model-00003-of-00003.safetensors"}},
            "model-00003-of-00003.safetensors is not",
        ),
        ({"weight_map": names | {"fc.weight": names["norm.weight"]}}, "fc.weight is not in"),
        ({"weight_map": {k: v for k, v in names.items() if k != "fc.weight"}}, "fc.weight of"),
    ):
        index.write_text(json.dumps(said))
        assert problem in refusal(folder, target, tmp_path / "x")
    index.write_text(json.dumps({"weight_map": names}))
    assert import_draft(folder, target, tmp_path / "back").kind == "eagle3"


def test_medusa_heads_have_the_numbers_and_sizes_that_their_folder_says(tmp_path):
    target = tiny_target()
    new_medusa_heads(target, DraftVocabulary.all_of(target.vocabulary), 2).save(tmp_path / "head")
    folder = export_draft(tmp_path / "head", target, "vllm", tmp_path / "out")
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    for key in ("num_heads", "hidden_size", "vocab_size"):
        (folder / "config.json").write_text(json.dumps(config | {key: 5}))
        assert f"{key} is 5" in refusal(folder, target, tmp_path / "x")
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors | {"blocks.999999999.layers.0.weight": torch.ones(2, 2)}, folder / "model.safetensors")
    assert "999999999" in refusal(folder, target, tmp_path / "x")
