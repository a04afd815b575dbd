"""`config.json` at the border: our head's configuration in an engine's keys, and back.

Every convention that differs between projects is converted here and nowhere else: which layer an id of a fused state means,
how RoPE is written, what a flag is called. Knows no tensors and no files.

Ids of fused states. Ours: tap k is the output of block k, counted from 0. vLLM and speculators: id k + 1, the input of layer
k + 1, at the top level. SGLang, ModelOpt and TensorRT-LLM: id k, below `eagle_config` (TensorRT-LLM: in its YAML).
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.models.eagle import EagleConfig
from draftsmith.models.fields import Fields, check_rope
from draftsmith.models.medusa import MedusaConfig
from draftsmith.models.serving.layouts import IDS, LAYOUTS
from draftsmith.models.target import Target

#: Keys of RoPE settings that older configurations have at the top level.
LOOSE = ("rope_theta", "partial_rotary_factor")
#: Names that heads' folders bear: of the head, or of the target's architecture, as SafeAILab's trainers leave it.
ARCHITECTURE = re.compile(r"\w*(?:[Ee]agle|EAGLE|Medusa|ForCausalLM)\w*")


def default_taps(blocks: int) -> tuple[int, ...]:
    """What every engine takes where a configuration names no ids: the inputs of layers 2, L // 2 and L − 3 (EAGLE-3)."""
    return tuple(sorted({1, blocks // 2 - 1, blocks - 4}))


def absolute(path: str) -> str:
    """A target as an engine finds it from any folder: a folder by its whole path, a hub name as it is."""
    place = Path(path).expanduser()
    return str(place.resolve()) if path and place.is_dir() else path


def rope_keys(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE settings in the new key and in those that older engines know."""
    old = {key: parameters[key] for key in LOOSE if key in parameters}
    scaling = {key: value for key, value in parameters.items() if key not in LOOSE}
    plain = parameters.get("rope_type", "default") == "default"
    return {**old, "rope_scaling": None if plain else scaling, "rope_parameters": dict(parameters)}


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE settings of a configuration in the new or in the old keys; 10000 where it says nothing, as every engine takes it."""
    new = config.get("rope_parameters")
    found = dict(new) if isinstance(new, Mapping) else dict(config.get("rope_scaling") or {})
    if "type" in found:
        found.setdefault("rope_type", found.pop("type"))
    found.setdefault("rope_type", "default")
    for key in LOOSE:
        if config.get(key) is not None:
            found.setdefault(key, config[key])
    found.setdefault("rope_theta", 10000.0)
    return found


def engine_config(config: Any, fmt: str, target: Target, dtype: str, K: int) -> dict[str, Any]:
    """`config.json` of a head (`EagleConfig` or `MedusaConfig`) for an engine. dtype: of its stored weights; K: tokens drafted."""
    layout = LAYOUTS[fmt, config.kind]
    stored = {"torch_dtype": dtype, "dtype": dtype}
    if config.kind == "medusa":
        sizes = {"hidden_size": config.target_width, "vocab_size": config.target_vocabulary, "num_heads": config.heads}
        return {**layout.values, **sizes, **stored}
    if config.kind == "eagle1":
        return {**layout.values, **_llama(config, target), **stored}
    if fmt == "speculators":
        return _speculators(config, target, stored, K)
    return {**layout.values, **_llama(config, target), **_flags(config), **_ids(config), **stored}


def _llama(config: EagleConfig, target: Target) -> dict[str, Any]:
    special = {key: getattr(target.config, key, None) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {
        "hidden_size": config.width,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "vocab_size": config.target_vocabulary,
        "max_position_embeddings": config.context,
        **rope_keys(config.rope_parameters),
        **{key: value for key, value in special.items() if value is not None},
    }


def _flags(config: EagleConfig) -> dict[str, Any]:
    """Every architecture flag, always written: where one is missing, engines do not agree on what it is."""
    return {
        "draft_vocab_size": config.draft_vocabulary,
        "norm_before_residual": config.norm_residual,
        "norm_before_fc": config.norm_joined,
        "fc_norm": config.norm_taps,
        "norm_output": config.norm_state,
    }


def _ids(config: EagleConfig) -> dict[str, Any]:
    return {
        IDS: [tap + 1 for tap in config.taps],
        "num_aux_hidden_states": len(config.taps),
        "eagle_config": {
            IDS: list(config.taps),
            "use_aux_hidden_state": True,
            "norm_before_fc": config.norm_joined,  # TensorRT-LLM reads this one here alone
        },
    }


def _speculators(config: EagleConfig, target: Target, stored: dict[str, Any], K: int) -> dict[str, Any]:
    layout, architectures = LAYOUTS["speculators", "eagle3"], getattr(target.config, "architectures", None)
    layer = {
        **layout.nested_values,
        "architectures": ["LlamaForCausalLM"],
        **_llama(config, target),
        **stored,
        "num_aux_hidden_states": len(config.taps),  # vLLM copies this from here alone
    }
    proposal = {"proposal_type": "greedy", "speculative_tokens": K, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        **layout.values,
        **_flags(config),
        **stored,
        "speculators_version": "0.9.0",
        "target_hidden_size": config.target_width,
        IDS: [tap + 1 for tap in config.taps],
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": absolute(target.path), "architectures": architectures or []},
        },
    }


def read_rope(inner: Fields) -> dict[str, Any]:
    """`rope_parameters` of somebody else's configuration. Raises UserError for what is no RoPE, or what says two things."""
    new, old = inner.inside("rope_parameters"), inner.inside("rope_scaling")
    for key in LOOSE:
        if inner.values.get(key) is not None:
            inner.number(key)
            if new.values.get(key) not in (None, inner.values[key]):
                raise inner.wrong(key, f"{new.values[key]!r}, as in rope_parameters")
    if new.values and old.values:
        said = rope_parameters({"rope_scaling": old.values})
        for key in sorted((said.keys() & new.values.keys()) - {"rope_theta"}):
            if said[key] != new.values[key]:
                raise old.wrong(key, f"{new.values[key]!r}, as in rope_parameters")
    found = rope_parameters({**inner.values, "rope_parameters": new.values or None, "rope_scaling": old.values})
    check_rope(Fields(new.place if new.values else old.place if old.values else inner.place, found))
    return found


def taps_of(config: Fields, blocks: int, nested_is_output: bool = True) -> tuple[int, ...]:
    """Our taps of a head that somebody else's configuration describes. Raises UserError for ids that are no block's output.

    nested_is_output: ids below `eagle_config` count outputs (SGLang, ModelOpt, SpecForge) and not inputs (vLLM's reading). The top
    level counts inputs, and goes first.
    """
    top, nested = config.ids(IDS), config.inside("eagle_config").ids(IDS)
    ids = top or nested
    taps = [i - 1 for i in top] if top else [i if nested_is_output else i - 1 for i in nested] if nested else None
    if taps is None:
        taps = list(default_taps(blocks))
    if len(set(taps)) != len(taps) or min(taps) < 0 or max(taps) >= blocks:
        raise UserError(
            f"{config.place}: {IDS} {str(ids)[:60] if ids else 'left out'} are blocks {str(taps)[:60]} (from 0): no distinct"
            f" outputs of this target's {blocks}; name the ids that the head was trained with"
        )
    return tuple(sorted(taps))


def medusa_config(heads: int, target: Target, config: Fields) -> MedusaConfig:
    """Medusa heads that somebody else trained for this target. Raises UserError for none, and for sizes that are not its own."""
    for key, wanted in (
        ("hidden_size", target.width),
        ("vocab_size", target.vocabulary),
        ("num_heads", heads),
        ("num_hidden_layers", 1),
        ("medusa_num_layers", 1),
    ):
        if config.whole(key, wanted) != wanted:
            raise config.wrong(key, f"{wanted}, as the target and the weights have it")
    return MedusaConfig("medusa", heads, target.width, target.vocabulary, target.vocabulary, target.fingerprint())


def eagle_config(
    config: Fields,
    inner: Fields,
    kind: str,
    target: Target,
    draft_vocabulary: int,
    fc_bias: bool,
    nested_is_output: bool,
) -> EagleConfig:
    """Our configuration of somebody else's head. inner: the part that describes its transformer. Raises UserError for a field that
    is missing or of another type, and for what our head cannot compute."""
    heads, width = inner.whole("num_attention_heads"), inner.whole("hidden_size")
    if inner.values.get("hidden_act", "silu") != "silu":
        raise inner.wrong("hidden_act", "silu, which alone our heads compute")
    if width != target.width or config.whole("target_hidden_size", width) != target.width:
        raise UserError(
            f"{config.place}: hidden_size {width} for a target of width {target.width}; both must be the same: name the target"
            " that the head was trained for"
        )
    flags: dict[str, Any] = dict(_flags_of(config)) if kind == "eagle3" else {}
    taps = taps_of(config, target.blocks, nested_is_output) if kind == "eagle3" else ()
    if kind == "eagle3" and inner.whole("num_aux_hidden_states", len(taps)) != len(taps):
        raise inner.wrong("num_aux_hidden_states", f"{len(taps)}, the number of its ids")
    return EagleConfig(
        kind=kind,
        width=width,
        target_width=target.width,
        target_vocabulary=target.vocabulary,
        draft_vocabulary=draft_vocabulary,
        taps=taps,
        layers=inner.whole("num_hidden_layers", 1),
        heads=heads,
        kv_heads=inner.whole("num_key_value_heads", heads),
        head_dim=inner.whole("head_dim", max(1, width // heads)),
        intermediate=inner.whole("intermediate_size"),
        norm_eps=inner.number("rms_norm_eps", 1e-6),
        rope_parameters=read_rope(inner),
        context=inner.whole("max_position_embeddings", target.context),
        target_fingerprint=target.fingerprint(),
        fc_bias=fc_bias,
        **flags,
    )


def check_architectures(config: Fields) -> None:
    """Raises UserError where `architectures` is no list of names of models that could be a head for a Llama layer."""
    said = config.values.get("architectures")
    names = said if isinstance(said, list) else None if said is not None else []
    if names is None or not all(isinstance(name, str) and ARCHITECTURE.fullmatch(name) for name in names):
        raise config.wrong("architectures", "a list of a head's class names, such as LlamaForCausalLMEagle3")


def _flags_of(config: Fields) -> dict[str, Any]:
    nested = config.inside("eagle_config")
    if "speculators_model_type" in config.values and config.values.get("norm_before_residual") is None:
        raise UserError(
            f"{config.place}: norm_before_residual is missing; the speculators library takes it for false, vLLM for true: add what"
            " the head was trained with"
        )
    # Each is read whatever the others say, so that a value of another type is refused in any case.
    norm_taps = [config.flag("fc_norm"), config.flag("use_aux_norm")]
    norm_state = [config.flag("norm_output"), nested.flag("return_hidden_post_norm")]
    return {
        "norm_residual": config.flag("norm_before_residual"),
        "norm_joined": nested.flag("norm_before_fc", config.flag("norm_before_fc")),
        "norm_taps": any(norm_taps),
        "norm_state": any(norm_state),
    }
