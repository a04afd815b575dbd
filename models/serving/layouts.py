"""What each engine reads: tensors, their shapes, and keys of `config.json`, as data with the source that says so.

A layout describes the folder of one kind of head for one engine. `expand` turns it into the exact tensors of a head of given
sizes; `draftsmith.models.serving.check` holds a folder against it. Knows nothing of our own heads, and computes nothing.

Dimensions: W the target's width, H the head's, V the target's vocabulary, D the draft's, A the number of fused states, Q and KV
query and key-value widths, I the feed-forward's; a product is written "A*W".
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Format = Literal["vllm", "sglang", "trtllm", "speculators", "transformers"]
FORMATS: tuple[Format, ...] = ("vllm", "sglang", "trtllm", "speculators", "transformers")
ENGINES: dict[str, str] = {
    "vllm": "vLLM 0.32.0",
    "sglang": "SGLang 0.5.23",
    "trtllm": "TensorRT-LLM, PyTorch backend (main, November 2026)",
    "speculators": "vLLM 0.32.0, in the layout of speculators 0.9.0",
    "transformers": "transformers 5.20 or newer",
}


@dataclass(frozen=True)
class Tensor:
    """One tensor, or one per layer, tap or head: the name may hold {first}, {later}, {tap} or {head}.

    when: the flag of the configuration that it belongs to ("pruned": the draft's vocabulary is smaller than the target's).
    """

    name: str
    shape: tuple[str, ...]
    when: str = ""
    dtype: str = "float"


@dataclass(frozen=True)
class Layout:
    """The folder of one kind of head for one engine.

    sources: file of the engine, and what was read there. single: prefix of the only layer of a one-layer head; with more,
    layer i is `layers.i`. values: keys that must have exactly this value; keys: that must be there; absent: that must not.
    nested: the key below which the head's transformer is described, where it is not the top level.
    """

    sources: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    values: Mapping[str, Any]
    keys: tuple[str, ...]
    absent: tuple[str, ...] = ("bias",)
    single: str = "layers.0"
    later_norm: str = "input_layernorm"
    nested: str = ""
    nested_values: Mapping[str, Any] = field(default_factory=dict)
    nested_keys: tuple[str, ...] = ()


def _layer(prefix: str, width: str) -> tuple[Tensor, ...]:
    return (
        Tensor(f"{prefix}.self_attn.q_proj.weight", ("Q", width)),
        Tensor(f"{prefix}.self_attn.k_proj.weight", ("KV", width)),
        Tensor(f"{prefix}.self_attn.v_proj.weight", ("KV", width)),
        Tensor(f"{prefix}.self_attn.o_proj.weight", ("H", "Q")),
        Tensor(f"{prefix}.post_attention_layernorm.weight", ("H",)),
        Tensor(f"{prefix}.mlp.gate_proj.weight", ("I", "H")),
        Tensor(f"{prefix}.mlp.up_proj.weight", ("I", "H")),
        Tensor(f"{prefix}.mlp.down_proj.weight", ("H", "I")),
    )


EAGLE3 = (
    Tensor("fc.weight", ("H", "A*W")),
    Tensor("fc_norm.{tap}.weight", ("W",), "fc_norm"),
    Tensor("input_norm.weight", ("A*W",), "norm_before_fc"),
    Tensor("{first}.input_layernorm.weight", ("H",)),
    Tensor("{first}.hidden_norm.weight", ("H",)),
    *_layer("{first}", "2*H"),
    Tensor("{later}.{later_norm}.weight", ("H",)),
    *_layer("{later}", "H"),
    Tensor("norm.weight", ("H",)),
    Tensor("lm_head.weight", ("D", "H")),
    Tensor("d2t", ("D",), "pruned", "int64"),
    Tensor("t2d", ("V",), "pruned", "bool"),
)
EAGLE1 = (
    Tensor("fc.weight", ("H", "2*H")),
    *_layer("{first}", "H"),
    Tensor("{later}.input_layernorm.weight", ("H",)),
    *_layer("{later}", "H"),
)
MEDUSA = (
    Tensor("blocks.{head}.layers.0.weight", ("W", "W")),
    Tensor("blocks.{head}.layers.0.bias", ("W",)),
    Tensor("lm_heads.{head}.weight", ("V", "W")),
)
LLAMA = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "vocab_size",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "torch_dtype",
    "dtype",
)
PLAIN = {
    "model_type": "llama",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "draft_vocab_size")
IDS = "eagle_aux_hidden_state_layer_ids"  # of the fused states; what an id means differs (`configs`)
FUSED = (IDS, "eagle_config", "num_aux_hidden_states")
EAGLE3_VALUES = PLAIN | {"architectures": ["LlamaForCausalLMEagle3"]}

LAYOUTS: dict[tuple[str, str], Layout] = {
    ("vllm", "eagle3"): Layout(
        (
            "vllm 0.32.0 vllm/model_executor/models/llama_eagle3.py: Eagle3LlamaForCausalLM.load_weights; layers after the"
            " first are normed by input_layernorm; fc has no bias; d2t is a parameter only where V and D differ",
            "vllm 0.32.0 vllm/model_executor/models/utils.py: a name in .bias is dropped where no parameter has it",
        ),
        EAGLE3,
        EAGLE3_VALUES,
        (*LLAMA, *FLAGS, *FUSED),
        single="midlayer",
    ),
    ("sglang", "eagle3"): Layout(
        (
            "sglang 0.5.23 sglang/srt/models/llama_eagle3.py: names are looked up with and without `model.`, unknown ones are"
            " ignored and missing ones left as they are; layers after the first are normed by hidden_norm; no fc where A*W = H",
            "sglang 0.5.23 sglang/srt/model_executor/model_runner_components/spec_aux_hidden_state.py: ids are read below"
            " eagle_config alone",
            "sglang 0.5.23 sglang/srt/models/llama.py: set_eagle3_layers_to_capture adds 1; what no layer reads is not captured",
        ),
        EAGLE3,
        EAGLE3_VALUES | {"norm_before_residual": False},
        (*LLAMA, *FLAGS, *FUSED),
        single="midlayer",
        later_norm="hidden_norm",
    ),
    ("trtllm", "eagle3"): Layout(
        (
            "TensorRT-LLM 00679c66 tensorrt_llm/_torch/models/modeling_speculative.py: Eagle3ForCausalLM.load_weights; layers.i is "
            "read as midlayer.i; layers after the first are normed by hidden_norm; fc is there only where A > 1",
        ),
        EAGLE3,
        EAGLE3_VALUES | {"norm_before_residual": False},
        (*LLAMA, *FLAGS, *FUSED),
        single="midlayer",
        later_norm="hidden_norm",
    ),
    ("speculators", "eagle3"): Layout(
        (
            "vllm 0.32.0 vllm/transformers_utils/configs/speculators/{base,algos}.py: keys that reach the head's configuration",
            "speculators 0.9.0 speculators/models/eagle3: names of parameters",
        ),
        EAGLE3,
        {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "tie_word_embeddings": False},
        (*FLAGS, "speculators_version", "speculators_config", IDS, "torch_dtype", "dtype"),
        nested="transformer_layer_config",
        nested_values=PLAIN,
        nested_keys=(*LLAMA, "num_aux_hidden_states"),
    ),
    ("vllm", "eagle1"): Layout(
        (
            "vllm 0.32.0 vllm/model_executor/models/llama_eagle.py: the first layer has no input_layernorm; fc has no bias",
        ),
        EAGLE1,
        PLAIN | {"architectures": ["EagleLlamaForCausalLM"]},
        LLAMA,
    ),
    ("sglang", "eagle1"): Layout(
        ("sglang 0.5.23 sglang/srt/models/llama_eagle.py: fc always has a bias; lm_head is the target's",),
        (*EAGLE1, Tensor("fc.bias", ("H",))),
        PLAIN | {"architectures": ["LlamaForCausalLMEagle"]},
        LLAMA,
    ),
    ("vllm", "medusa"): Layout(
        (
            "vllm 0.32.0 vllm/model_executor/models/medusa.py: biases only with medusa_fc_bias; every head has V rows",
            "vllm 0.32.0 vllm/transformers_utils/configs/medusa.py: any key with num and heads, or num and layers, is taken for"
            " these",
        ),
        MEDUSA,
        {"architectures": ["MedusaModel"], "model_type": "medusa", "num_hidden_layers": 1, "medusa_fc_bias": True},
        ("hidden_size", "vocab_size", "num_heads", "torch_dtype", "dtype"),
        absent=("num_attention_heads", "num_key_value_heads", "original_lm_head", "truncated_vocab_size"),
    ),
}


@dataclass(frozen=True)
class Expected:
    """Shape and type ("float", "int64", "bool") of one tensor."""

    shape: tuple[int, ...]
    dtype: str


def expand(layout: Layout, sizes: Mapping[str, int], flags: Mapping[str, bool]) -> dict[str, Expected]:
    """Every tensor of a head of these sizes (the letters above, and `layers` and `heads`), by its name in the file."""
    layers = sizes.get("layers", 1)
    places = {
        "{first}": [layout.single if layers == 1 else "layers.0"],
        "{later}": [f"layers.{i}" for i in range(1, layers)],
        "{tap}": list(map(str, range(sizes.get("A", 0)))),
        "{head}": list(map(str, range(sizes.get("heads", 0)))),
    }
    found: dict[str, Expected] = {}
    for tensor in layout.tensors:
        if tensor.when and not flags.get(tensor.when, False):
            continue
        shape = tuple(_product(dimension, sizes) for dimension in tensor.shape)
        name = tensor.name.replace("{later_norm}", layout.later_norm)
        place = next((key for key in places if key in name), None)
        for value in places[place] if place else [""]:
            found[name.replace(place, value) if place else name] = Expected(shape, tensor.dtype)
    return found


def _product(dimension: str, sizes: Mapping[str, int]) -> int:
    result = 1
    for factor in dimension.split("*"):
        result *= int(factor) if factor.isdigit() else sizes[factor]
    return result
