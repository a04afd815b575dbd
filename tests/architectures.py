"""The architectures that are held to be exact or refused, as tiny random models: one list for the tests and for
docs/architectures.md."""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from kit import CONTEXT, WIDTH, WINDOW, tiny_tokenizer

from draftsmith.models.target import Target

COMMON: dict[str, Any] = {
    "vocab_size": 150,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,  # far from uniform: a flipped convention must show
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
IDS = {key: COMMON[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "initializer_range")}
SHAPE = {key: COMMON[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
MOE = {"num_experts_per_tok": 2}
PAIRS = ["sliding_attention", "full_attention"] * 2
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": CONTEXT // 4,
}


@dataclass(frozen=True)
class Architecture:
    """`config` is the class's name in `transformers`; `note` says what is peculiar to it (supported) or why not (refused)."""

    name: str
    config: str
    note: str
    fields: dict[str, Any] = field(default_factory=dict)
    common: bool = True  # its configuration knows the fields of COMMON

    def new_config(self, **options: Any) -> Any:
        return getattr(transformers, self.config)(**((COMMON if self.common else {}) | self.fields | options))


# The sixteen that must work, with variants whose conventions differ, then the next of each kind.
SUPPORTED = (
    Architecture("Llama", "LlamaConfig", "RoPE, grouped-query attention"),
    Architecture(
        "GPT-2",
        "GPT2Config",
        "learned positions, tied head",
        {**IDS, "n_embd": WIDTH, "n_layer": 4, "n_head": 4, "n_positions": CONTEXT},
        False,
    ),
    Architecture("Qwen2", "Qwen2Config", "biases on query, key and value"),
    Architecture("Qwen3", "Qwen3Config", "norms on query and key", {"head_dim": 8}),
    Architecture(
        "Qwen3-MoE", "Qwen3MoeConfig", "experts", {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 24, **MOE}
    ),
    Architecture("Mistral", "MistralConfig", "all attention full", {"sliding_window": None}),
    Architecture("Mistral, window", "MistralConfig", "all attention in a window", {"sliding_window": WINDOW}),
    Architecture(
        "Gemma 2",
        "Gemma2Config",
        "norm gain 1 + w, soft-caps on attention and logits, alternating windows",
        {
            "head_dim": 8,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 8,
            "final_logit_softcapping": 5.0,
            "attn_logit_softcapping": 10.0,
        },
    ),
    Architecture(
        "Gemma 3 (text)",
        "Gemma3TextConfig",
        "norm gain 1 + w, a RoPE base for each kind of layer",
        {"head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8, "layer_types": PAIRS},
    ),
    Architecture(
        "Phi-3", "Phi3Config", "fused projections; longrope up to its original length", {"sliding_window": None}
    ),
    Architecture("OLMo 2", "Olmo2Config", "norms behind attention and MLP"),
    Architecture(
        "Falcon",
        "FalconConfig",
        "multi-query attention, parallel MLP; without ALiBi",
        {**IDS, **SHAPE, "multi_query": True, "alibi": False},
        False,
    ),
    Architecture(
        "Falcon, new decoder",
        "FalconConfig",
        "grouped-query attention, two norms",
        {**IDS, **SHAPE, "num_kv_heads": 2, "new_decoder_architecture": True, "alibi": False},
        False,
    ),
    Architecture(
        "OPT",
        "OPTConfig",
        "learned positions with an offset of 2",
        {
            **SHAPE,
            "vocab_size": 150,
            "ffn_dim": 48,
            "word_embed_proj_dim": WIDTH,
            "max_position_embeddings": CONTEXT,
            "init_std": 0.2,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        False,
    ),
    Architecture(
        "GPT-NeoX",
        "GPTNeoXConfig",
        "RoPE on a quarter of each head, parallel residual",
        {**IDS, **SHAPE, "hidden_size": 64, "intermediate_size": 48, "max_position_embeddings": CONTEXT},
        False,
    ),
    Architecture("SmolLM3", "SmolLM3Config", "every second layer here without RoPE", {"no_rope_layer_interval": 2}),
    Architecture(
        "gpt-oss",
        "GptOssConfig",
        "attention sinks (eager attention), experts, YaRN, alternating windows",
        {"head_dim": 8, "num_local_experts": 4, "sliding_window": WINDOW, "rope_parameters": GPT_OSS_ROPE, **MOE},
    ),
    Architecture("Gemma", "GemmaConfig", "norm gain 1 + w, scaled embeddings", {"head_dim": 8}),
    Architecture(
        "Qwen2, window",
        "Qwen2Config",
        "windows in the upper layers",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    Architecture(
        "OLMo 3", "Olmo3Config", "norms behind, alternating windows", {"sliding_window": WINDOW, "layer_types": PAIRS}
    ),
    Architecture("Cohere", "CohereConfig", "scaled logits, parallel MLP", {"logit_scale": 0.7}),
    Architecture(
        "Cohere 2",
        "Cohere2Config",
        "scaled logits, full layers without RoPE",
        {"logit_scale": 0.7, "sliding_window": WINDOW, "layer_types": PAIRS},
    ),
    Architecture(
        "Granite",
        "GraniteConfig",
        "logits, embeddings, residuals and attention scaled",
        {"logits_scaling": 0.5, "embedding_multiplier": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3},
    ),
    Architecture("Mixtral", "MixtralConfig", "experts", {"num_local_experts": 4, **MOE}),
    Architecture(
        "DeepSeek-V3",
        "DeepseekV3Config",
        "latent attention: keys and values of different widths",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 2,
            "moe_intermediate_size": 24,
            **MOE,
        },
    ),
    Architecture("Phi", "PhiConfig", "partial RoPE, bias on the head"),
    Architecture("StableLM", "StableLmConfig", "partial RoPE, layer norms"),
    Architecture(
        "StarCoder2", "Starcoder2Config", "layer norms, all attention in a window", {"sliding_window": WINDOW}
    ),
    Architecture("GLM-4", "Glm4Config", "partial RoPE on pairs of neighbours", {"head_dim": 8}),
    Architecture("Nemotron", "NemotronConfig", "layer norm gain 1 + w, partial RoPE", {"head_dim": 8}),
    Architecture(
        "GPT-J",
        "GPTJConfig",
        "partial RoPE on pairs of neighbours, bias on the head",
        {**IDS, "n_embd": WIDTH, "n_layer": 4, "n_head": 4, "n_positions": CONTEXT, "rotary_dim": 4},
        False,
    ),
    Architecture(
        "GPT-BigCode",
        "GPTBigCodeConfig",
        "learned positions, multi-query attention",
        {**IDS, "n_embd": WIDTH, "n_layer": 4, "n_head": 4, "n_positions": CONTEXT},
        False,
    ),
)
NEXT_OF_THEIR_KIND = 17  # the first of SUPPORTED that is one

RUNNING = "a running state, which cannot be rolled back to an earlier token"
PLACES = "ALiBi by place in the cache, where the nodes of a tree stand side by side"
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
REFUSED = (
    Architecture("Mamba", "MambaConfig", RUNNING, {**SHAPE, "vocab_size": 150, "state_size": 4}, False),
    Architecture(
        "Mamba-2",
        "Mamba2Config",
        RUNNING,
        {
            "vocab_size": 150,
            "hidden_size": WIDTH,
            "num_hidden_layers": 2,
            "state_size": 4,
            "num_heads": 4,
            "head_dim": 16,
            "n_groups": 1,
        },
        False,
    ),
    Architecture(
        "Falcon-Mamba",
        "FalconMambaConfig",
        RUNNING,
        {"vocab_size": 150, "hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 4},
        False,
    ),
    Architecture(
        "Jamba",
        "JambaConfig",
        RUNNING,
        {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4},
    ),
    Architecture(
        "Zamba",
        "ZambaConfig",
        RUNNING,
        {
            "vocab_size": 150,
            "hidden_size": WIDTH,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "attention_head_dim": 16,
            "layers_block_type": ["mamba", "hybrid"] * 2,
            "n_mamba_heads": 2,
            "mamba_d_state": 4,
        },
        False,
    ),
    Architecture(
        "Zamba2",
        "Zamba2Config",
        RUNNING,
        {
            "vocab_size": 150,
            "hidden_size": WIDTH,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "n_mamba_heads": 4,
            "mamba_headdim": 16,
            "mamba_d_state": 4,
            "mamba_ngroups": 1,
            "layers_block_type": ["mamba", "hybrid"] * 2,
            "num_mem_blocks": 1,
        },
        False,
    ),
    Architecture(
        "Bamba",
        "BambaConfig",
        RUNNING,
        {"attn_layer_indices": [1, 3], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1},
    ),
    Architecture(
        "Falcon-H1",
        "FalconH1Config",
        RUNNING,
        {
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_state": 8,
            "mamba_d_head": 8,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 8,
        },
    ),
    Architecture(
        "Granite 4 hybrid",
        "GraniteMoeHybridConfig",
        RUNNING,
        {
            "layer_types": ["mamba", "attention"] * 2,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "shared_intermediate_size": 32,
        },
    ),
    Architecture(
        "Nemotron-H",
        "NemotronHConfig",
        RUNNING,
        {
            "vocab_size": 150,
            "hidden_size": WIDTH,
            "hybrid_override_pattern": "M*M*",
            "num_attention_heads": 4,
            "head_dim": 8,
            "num_key_value_heads": 2,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 1,
        },
        False,
    ),
    Architecture("RecurrentGemma", "RecurrentGemmaConfig", RUNNING, {"lru_width": 32, "attention_window_size": 8}),
    Architecture(
        "Qwen3-Next",
        "Qwen3NextConfig",
        RUNNING,
        {
            "head_dim": 8,
            "num_experts": 4,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            **LINEAR,
            **MOE,
        },
    ),
    Architecture("Qwen3.5", "Qwen3_5TextConfig", RUNNING, {"head_dim": 8, **LINEAR}),
    Architecture("LFM2", "Lfm2Config", RUNNING, {"layer_types": ["conv", "full_attention"] * 2}),
    Architecture(
        "MiniMax",
        "MiniMaxConfig",
        RUNNING,
        {"layer_types": ["linear_attention", "full_attention"] * 2, "num_local_experts": 2},
    ),
    Architecture("OLMo hybrid", "OlmoHybridConfig", RUNNING),
    Architecture(
        "RWKV",
        "RwkvConfig",
        RUNNING,
        {"vocab_size": 150, "hidden_size": WIDTH, "num_hidden_layers": 2, "attention_hidden_size": WIDTH},
        False,
    ),
    Architecture(
        "xLSTM",
        "xLSTMConfig",
        RUNNING,
        {"vocab_size": 150, "hidden_size": WIDTH, "num_heads": 4, "num_blocks": 2},
        False,
    ),
    Architecture(
        "Llama 4",
        "Llama4TextConfig",
        "attention in chunks, for which there is no mask yet",
        {"head_dim": 8, "attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 48},
    ),
    Architecture(
        "GPT-Neo",
        "GPTNeoConfig",
        "windows by place in the cache, where the nodes of a tree stand side by side",
        {
            **IDS,
            "hidden_size": WIDTH,
            "num_layers": 4,
            "num_heads": 4,
            "max_position_embeddings": CONTEXT,
            "window_size": 8,
            "attention_types": [[["global", "local"], 2]],
        },
        False,
    ),
    Architecture("Falcon, ALiBi", "FalconConfig", PLACES, {**IDS, **SHAPE, "multi_query": False, "alibi": True}, False),
    Architecture(
        "BLOOM", "BloomConfig", PLACES, {"vocab_size": 150, "hidden_size": WIDTH, "n_layer": 2, "n_head": 4}, False
    ),
    Architecture("MPT", "MptConfig", PLACES, {"vocab_size": 150, "d_model": WIDTH, "n_layers": 2, "n_heads": 4}, False),
    Architecture(
        "BERT",
        "BertConfig",
        "attention to tokens behind",
        {
            "vocab_size": 150,
            "hidden_size": WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 32,
            "is_decoder": False,
        },
        False,
    ),
)
#: Refused from their configuration alone, before anything is built.
ENCODER_DECODERS = (
    Architecture(
        "T5",
        "T5Config",
        "an encoder-decoder",
        {"vocab_size": 150, "d_model": WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4},
        False,
    ),
    Architecture(
        "BART",
        "BartConfig",
        "an encoder-decoder",
        {
            "vocab_size": 150,
            "d_model": WIDTH,
            "decoder_layers": 2,
            "encoder_layers": 2,
            "decoder_ffn_dim": 32,
            "encoder_ffn_dim": 32,
            "decoder_attention_heads": 4,
            "encoder_attention_heads": 4,
        },
        False,
    ),
)
#: Parameters for tests that are run on the first ones always, on the rest as long tests.
MOST = [
    pytest.param(entry.name, marks=pytest.mark.long if number >= NEXT_OF_THEIR_KIND else ())
    for number, entry in enumerate(SUPPORTED)
]
BY_NAME = {entry.name: entry for entry in (*SUPPORTED, *REFUSED, *ENCODER_DECODERS)}


def new_model(entry: Architecture, **options: Any) -> Any:
    """A random fp32 model. Gains and biases differ from their start values, so that a missing one shows."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(entry.new_config(**options), dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


@cache
def target_of(name: str) -> Target:
    """The tiny target of one supported architecture, built once: nobody may change it."""
    return Target(new_model(BY_NAME[name]), tiny_tokenizer(), name)


def page_tables() -> str:
    """The two tables of docs/architectures.md."""
    lines = ["| architecture | model type | peculiar to it |", "|---|---|---|"]
    lines += [f"| {entry.name} | `{entry.new_config().model_type}` | {entry.note} |" for entry in SUPPORTED]
    lines += ["", "| architecture | model type | why not |", "|---|---|---|"]
    refused = (*REFUSED, *ENCODER_DECODERS)
    lines += [f"| {entry.name} | `{entry.new_config().model_type}` | {entry.note} |" for entry in refused]
    return "\n".join(lines)
