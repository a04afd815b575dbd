"""Exports: an independent reading of each folder computes what the trainer computes, refusals, READMEs, the draft LM."""

import json
import re

import pytest
import torch
from exports import half_of, saved, trainers_logits
from kit import tiny_target, tiny_target_folder
from plain_head import PlainHead
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from draftsmith.errors import UserError
from draftsmith.models.draft import DraftLM
from draftsmith.models.eagle import EagleHead
from draftsmith.models.medusa import new_medusa_heads
from draftsmith.models.serving.configs import rope_keys, rope_parameters
from draftsmith.models.serving.export import export_draft
from draftsmith.models.serving.layouts import FORMATS
from draftsmith.models.target import Target
from draftsmith.models.vocabulary import DraftVocabulary

ENGINES = ("vllm", "sglang", "trtllm", "speculators")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


CASES = {
    "eagle3": {},
    "pruned": {"half": True},
    "two layers": {"layers": 2},
    "two taps": {"taps": (0, 2)},
    "3.1": {"norm_taps": True, "norm_state": True, "confidence": True},
    "norm of the concatenation": {"norm_joined": True, "half": True},
    "residual": {"norm_residual": True},
    "eagle1": {"kind": "eagle1", "layers": 2},
    "eagle1 with a bias": {"kind": "eagle1", "fc_bias": True},
}
SERVED = {
    "residual": ("vllm", "speculators"),
    "eagle1": ("vllm", "sglang"),
    "eagle1 with a bias": ("sglang",),
}


@pytest.mark.parametrize("case", CASES)
def test_a_plain_reading_of_each_export_gives_the_trainers_logits(tmp_path, case):
    """FAULTS 43, 45: every flag, in every engine that has it; 24: with the RoPE settings of old and of new keys."""
    target = tiny_target(rope_parameters=LLAMA3)
    options = dict(CASES[case])
    vocabulary = half_of(target) if options.pop("half", False) else None
    head = saved(tmp_path / "head", target, vocabulary, **options)
    ids, steps = torch.randint(6, 100, (14,), generator=torch.Generator().manual_seed(1)), 3
    wanted = trainers_logits(head, target, ids, steps)
    for engine in SERVED.get(case, ENGINES):
        folder = export_draft(tmp_path / "head", target, engine, tmp_path / engine)
        plain = PlainHead(folder, engine, target.model)
        # The trainer's slot reads the text's own tokens at each step; so does a chain that drafted just these.
        found = plain.chain(ids[: len(ids) - steps + 1], ids[len(ids) - steps + 1 :])
        torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_exported_tensor_equals_its_source_bit_for_bit_in_its_stated_type(tmp_path, engine):
    """FAULTS 43 and 50, for a head that is stored in bfloat16."""
    target = tiny_target()
    head = saved(tmp_path / "head", target, half_of(target))
    head.to(torch.bfloat16).save(tmp_path / "head")
    folder = export_draft(tmp_path / "head", target, engine, tmp_path / "out")
    source, found = load_file(tmp_path / "head" / "model.safetensors"), load_file(folder / "model.safetensors")
    assert len(source) == len(found)
    for name, value in found.items():
        assert torch.equal(value, source[name.replace("midlayer.", "layers.0.")]), name
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert {value.dtype for value in found.values()} == {torch.bfloat16, torch.int64, torch.bool}
    readme = (folder / "README.md").read_text()
    size = sum(value.numel() * value.element_size() for value in found.values())
    assert f"{len(found)} tensors, {size:,} bytes." in readme
    assert "Embedding: the target's own, not in this folder." in readme
    assert "Output head: its own." in readme


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        LLAMA3,
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ],
    ids=lambda parameters: parameters["rope_type"],
)
def test_rope_is_the_targets_after_each_export_in_old_keys_and_in_new_ones(tmp_path, parameters):
    """FAULTS 24."""
    target = tiny_target(rope_parameters=parameters)
    head = saved(tmp_path / "head", target)
    assert head.config.rope_parameters == target.config.rope_parameters
    assert EagleHead.load(tmp_path / "head", target).config.rope_parameters == target.config.rope_parameters
    for engine in ENGINES:
        folder = export_draft(tmp_path / "head", target, engine, tmp_path / engine)
        config = json.loads((folder / "config.json").read_text())
        layer = config.get("transformer_layer_config", config)
        old = {key: value for key, value in layer.items() if key != "rope_parameters"}
        new = {
            key: value
            for key, value in layer.items()
            if key not in ("rope_scaling", "rope_theta", "partial_rotary_factor")
        }
        for written in (layer, old, new):
            kept = {
                key: value
                for key, value in written.items()
                if key not in ("architectures", "model_type", "dtype", "torch_dtype")
            }
            assert LlamaConfig(**kept).rope_parameters == target.config.rope_parameters
            assert rope_parameters(written) == target.config.rope_parameters
    assert rope_parameters({"rope_scaling": {"type": "linear", "factor": 2.0}})["rope_type"] == "linear"
    assert rope_keys({"rope_type": "default", "rope_theta": 7.0})["rope_scaling"] is None


REFUSED = {
    "eagle1": ({"kind": "eagle1"}, ("trtllm", "speculators")),
    "bias": ({"fc_bias": True}, ENGINES),
    "eagle1 bias": ({"kind": "eagle1", "fc_bias": True}, ("vllm", "trtllm", "speculators")),
    "narrow": ({"width": 16}, ENGINES),
    "one tap": ({"taps": (1,)}, ("sglang", "trtllm")),
    "last block": ({"taps": (0, 3)}, ("sglang",)),
    "ablation": ({"inputs": "token"}, ENGINES),
    "residual": ({"norm_residual": True}, ("sglang", "trtllm")),
    "both norms": ({"norm_joined": True, "norm_taps": True}, ("trtllm",)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_an_engine_cannot_serve_is_refused_by_name_and_nothing_else_is(tmp_path, case):
    """FAULTS 49: a narrow head is exported where it can be, to our own layout."""
    target, (options, refusing) = tiny_target(), REFUSED[case]
    saved(tmp_path / "head", target, **options)
    for engine in FORMATS:
        if engine in refusing:
            with pytest.raises(UserError, match="cannot serve"):
                export_draft(tmp_path / "head", target, engine, tmp_path / engine)
            assert not (tmp_path / engine).exists()
        else:
            assert (export_draft(tmp_path / "head", target, engine, tmp_path / engine) / "README.md").exists()


def test_scaled_embeddings_stop_eagle_1_alone(tmp_path):
    target = tiny_target()
    embedding = target.model.get_input_embeddings()
    saved(tmp_path / "one", target, kind="eagle1")
    saved(tmp_path / "three", target)
    embedding.register_forward_hook(lambda module, inputs, output: output * 5.0)
    with pytest.raises(UserError, match="embeddings are scaled"):
        export_draft(tmp_path / "one", target, "vllm", tmp_path / "x")
    export_draft(tmp_path / "three", target, "vllm", tmp_path / "y")
    assert "the target scales its embeddings" in (tmp_path / "y" / "README.md").read_text()


def test_medusa_heads_are_vllms_alone_and_with_the_whole_vocabulary(tmp_path):
    target = tiny_target()
    heads = new_medusa_heads(target, DraftVocabulary.all_of(target.vocabulary), 3)
    heads.save(tmp_path / "heads")
    found = load_file(export_draft(tmp_path / "heads", target, "vllm", tmp_path / "vllm") / "model.safetensors")
    assert sorted(found) == sorted(
        f"{name.replace('{}', str(i))}"
        for i in range(3)
        for name in ("blocks.{}.layers.0.bias", "blocks.{}.layers.0.weight", "lm_heads.{}.weight")
    )
    # vLLM drafts one token per head, whatever number it is told: it must be told this one.
    (tmp_path / "eval.json").write_text(json.dumps({"results": [{"domain": "code", "temperature": 0.0, "K": 2}]}))
    export_draft(tmp_path / "heads", target, "vllm", tmp_path / "vllm", results=tmp_path / "eval.json")
    assert '"num_speculative_tokens": 3' in (tmp_path / "vllm" / "README.md").read_text()
    for engine in ("sglang", "trtllm", "speculators"):
        with pytest.raises(UserError, match="Medusa heads"):
            export_draft(tmp_path / "heads", target, engine, tmp_path / engine)
    new_medusa_heads(target, half_of(target), 3).save(tmp_path / "pruned")
    with pytest.raises(UserError, match="without draft_vocabulary"):
        export_draft(tmp_path / "pruned", target, "vllm", tmp_path / "no")


@pytest.mark.parametrize("fmt", ["vllm", "sglang", "trtllm", "transformers"])
def test_a_draft_lm_is_an_ordinary_model_with_the_targets_rows_and_tokenizer(tmp_path, fmt):
    """FAULTS 43 and 24; the width of a draft LM is its own affair (49)."""
    target = Target.load(tiny_target_folder(tmp_path, "padded-vocab"))
    draft = DraftLM.from_scratch(target, "half", 0)
    draft.save(tmp_path / "lm", target)
    folder = export_draft(tmp_path / "lm", target, fmt, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(folder)
    source = draft.model.state_dict()
    assert all(torch.equal(value, source[name]) for name, value in model.state_dict().items())
    config = json.loads((folder / "config.json").read_text())
    assert "draft_vocab_size" not in config
    assert config["vocab_size"] == target.vocabulary
    assert (
        rope_parameters(config) == target.config.rope_parameters == AutoConfig.from_pretrained(folder).rope_parameters
    )
    assert DraftLM.load(folder, target).vocabulary == target.vocabulary
    assert model.generation_config.num_assistant_tokens == 5
    assert "Embedding: its own." in (folder / "README.md").read_text()
    if fmt == "transformers":  # FAULTS 46: the README's program runs as it stands
        ids = torch.randint(6, 100, (1, 8))
        plain = target.model.generate(ids, max_new_tokens=6, do_sample=False)
        assert torch.equal(target.model.generate(ids, assistant_model=model, max_new_tokens=6, do_sample=False), plain)


@pytest.mark.parametrize(("stored", "stated"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_draft_lm_keeps_the_type_that_it_is_stored_in_whatever_its_configuration_says(tmp_path, stored, stated):
    target = Target.load(tiny_target_folder(tmp_path))
    draft = DraftLM.from_scratch(target, "half", 0)
    draft.model.to(getattr(torch, stored))
    draft.save(tmp_path / "lm", target)
    config = json.loads((tmp_path / "lm" / "config.json").read_text())
    (tmp_path / "lm" / "config.json").write_text(json.dumps(config | {"dtype": stated}))
    folder = export_draft(tmp_path / "lm", target, "vllm", tmp_path / "out")
    source, found = (load_file(place / "model.safetensors") for place in (tmp_path / "lm", folder))
    assert {value.dtype for value in found.values()} == {getattr(torch, stored)}
    assert all(torch.equal(value, source[name]) for name, value in found.items())
    assert json.loads((folder / "config.json").read_text())["dtype"] == stored


def test_a_draft_with_fewer_rows_than_its_target_is_padded_and_that_is_said(tmp_path):
    target = Target.load(tiny_target_folder(tmp_path, "padded-vocab"))
    tiny_target().model.save_pretrained(tmp_path / "lm")
    target.tokenizer.save_pretrained(tmp_path / "lm")
    folder = export_draft(tmp_path / "lm", target, "vllm", tmp_path / "out")
    assert load_file(folder / "model.safetensors")["lm_head.weight"].shape[0] == target.vocabulary
    assert "10 rows of zeros were added" in (folder / "README.md").read_text()


def test_the_readme_starts_the_engine_and_says_what_was_measured(tmp_path):
    """FAULTS 46: exact flags, for K of the evaluation."""
    target = Target.load(tiny_target_folder(tmp_path))
    saved(tmp_path / "head", target, confidence=True)
    share = {"value": 0.5, "low": 0.4, "high": 0.6, "count": 9}
    entry = {
        "domain": "code",
        "temperature": 0.0,
        "K": 4,
        "tokens_per_verify": {"value": 2.5, "low": 2.25, "high": 2.75},
    }
    tree = {"domain": "code", "temperature": 1.0, "K": 4, "tree": "dynamic-32", "drafting": "sampled"}
    (tmp_path / "eval.json").write_text(json.dumps({"schema": 1, "results": [entry | {"survival": [share]}, tree]}))
    for engine in FORMATS:
        export_draft(tmp_path / "head", target, engine, tmp_path / engine, results=tmp_path / "eval.json")
    text = {engine: (tmp_path / engine / "README.md").read_text() for engine in FORMATS}
    config = json.loads(re.search(r"--speculative-config '(.*)'", text["vllm"])[1])
    assert config == {"method": "eagle3", "model": str(tmp_path / "vllm"), "num_speculative_tokens": 4}
    flags = "--speculative-num-steps 4 --speculative-eagle-topk 1 --speculative-num-draft-tokens 5"
    assert (
        f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {tmp_path / 'sglang'} {flags}" in text["sglang"]
    )
    assert f"--config {tmp_path / 'trtllm'}/speculative.yaml" in text["trtllm"]
    assert "eagle3_layers_to_capture: [0, 1, 2]" in (tmp_path / "trtllm" / "speculative.yaml").read_text()
    for engine in ENGINES:
        assert "| code | 0 | chain of 4 | 2.50 (2.25 to 2.75) | 50 % |" in text[engine]
        assert "| code | 1 | dynamic-32, 4 deep, sampled | not measured |  |" in text[engine]
        assert "Of a chain as deep as a tree less is accepted." in text[engine]
        assert "confidence output was left out" in text[engine]
    spec = json.loads((tmp_path / "speculators" / "config.json").read_text())["speculators_config"]
    assert spec["proposal_methods"][0]["speculative_tokens"] == 4
    assert spec["verifier"]["name_or_path"] == target.path


def test_an_export_replaces_an_export_and_nothing_else(tmp_path):
    target = tiny_target()
    saved(tmp_path / "head", target)
    out = export_draft(tmp_path / "head", target, "trtllm", tmp_path / "out")
    export_draft(tmp_path / "head", target, "vllm", out)
    assert not (out / "speculative.yaml").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("# My thesis\n")
    for place in (tmp_path / "mine", tmp_path / "head"):
        with pytest.raises(UserError, match="no export"):
            export_draft(tmp_path / "head", target, "vllm", place)
    with pytest.raises(UserError, match="no such format"):
        export_draft(tmp_path / "head", target, "gguf", tmp_path / "z")


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_the_target_is_the_same_before_and_after_a_draft_is_attached_exported_and_loaded(tmp_path, kind):
    """FAULTS 51."""
    target = tiny_target("tied")
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    saved(tmp_path / "head", target, kind=kind)
    export_draft(tmp_path / "head", target, "vllm", tmp_path / "out")
    EagleHead.load(tmp_path / "head", target)
    assert all(torch.equal(value, before[name]) for name, value in target.model.state_dict().items())
    assert target.fingerprint() == Target(target.model, target.tokenizer).fingerprint()


def test_a_head_whose_own_files_are_damaged_is_refused_in_one_line_that_names_what_is_wrong(tmp_path):
    target, folder = tiny_target(), tmp_path / "head"
    saved(folder, target, half_of(target))
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")

    def refusal() -> str:
        with pytest.raises(UserError) as caught:
            export_draft(folder, target, "vllm", tmp_path / "out")
        said = str(caught.value)
        assert str(folder) in said
        assert "\n" not in said
        assert "rope_parameters" not in said, "only what is wrong is named"
        return said

    for change, said in (
        ({"kv_heads": 3}, "4 heads cannot share 3 heads of keys and values evenly"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"layers": 10**7}, "more layers or heads than"),
        ({"width": 10**9}, "of another shape"),
        ({"taps": [0, 1, 99]}, "taps [0, 1, 99] of a target with 4 blocks"),
        ({"taps": [1, 1, 2]}, "taps is"),
        ({"draft_vocabulary": 9}, "draft vocabulary does not fit"),
        ({"norm_residual": "yes"}, "norm_residual is 'yes'"),
        ({"context": None}, "context is 'None'"),
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        assert said in refusal()
    (folder / "config.json").write_text(json.dumps(config))
    for change, said in (
        ({"fc.weight": tensors["fc.weight"].to(torch.float8_e4m3fn)}, "fc.weight is stored as float8_e4m3fn"),
        ({"fc.weight": tensors["fc.weight"] * float("nan")}, "NaN"),
        ({"fc.weight": tensors["fc.weight"].to(torch.int8)}, "no float"),
        ({"t2d": ~tensors["t2d"]}, "t2d"),
        ({"d2t": tensors["d2t"].float()}, "d2t"),
        ({"d2t": tensors["d2t"] + 2**62}, "d2t"),
    ):
        save_file(tensors | change, folder / "model.safetensors")
        assert said in refusal()
    (folder / "config.json").write_bytes(b'{"a":' * 100_000)
    assert "not a usable model folder" in refusal()


def test_a_draft_lm_that_its_loader_would_take_without_a_word_is_refused(tmp_path):
    target = Target.load(tiny_target_folder(tmp_path))
    folder = tmp_path / "lm"
    DraftLM.from_scratch(target, "half", 0).save(folder, target)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    name, index = "model.norm.weight", folder / "model.safetensors.index.json"
    for change, values, shards, said in (
        ({name: tensors[name].to(torch.float8_e5m2)}, {}, None, f"{name} is stored as F8_E5M2"),
        ({name: tensors[name] * float("inf")}, {}, None, f"{name}: holds NaN or infinity"),
        ({}, {"max_position_embeddings": -1}, None, "max_position_embeddings is -1"),
        ({}, {}, {name: "model-00001-of-00002.safetensors"}, "model-00001-of-00002.safetensors is not here"),
    ):
        save_file(tensors | change, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config | values))
        if shards:
            index.write_text(json.dumps({"weight_map": shards}))
        with pytest.raises(UserError, match=re.escape(said)):
            export_draft(folder, target, "vllm", tmp_path / "out")
    index.unlink()
    assert export_draft(folder, target, "vllm", tmp_path / "out").is_dir()
