"""Import a head that somebody else trained: SafeAILab's EAGLE and EAGLE-3 folders, vLLM's, speculators', SGLang's, Medusa's.

The tensors are kept bit for bit under our names, with the draft vocabulary's mapping; what our head cannot compute is refused by
name rather than left out. The result is a head folder like a trained one: it can be evaluated, trained on, and exported.
"""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.errors import UserError, first_line, listed
from draftsmith.files import check_folder_place, publish_files, publish_json
from draftsmith.models.eagle import EagleConfig, EagleHead
from draftsmith.models.fields import Fields
from draftsmith.models.heads import check_weights, head_kind
from draftsmith.models.medusa import MedusaConfig, MedusaHeads
from draftsmith.models.serving.check import WEIGHTS, check_maps, check_tensors, read_config, read_tensors
from draftsmith.models.serving.configs import check_architectures, eagle_config, medusa_config
from draftsmith.models.serving.layouts import IDS, Expected
from draftsmith.models.serving.names import our_name, their_name
from draftsmith.models.target import Target
from draftsmith.models.vocabulary import DraftVocabulary

#: What a name holds -> why a head that has it cannot be imported.
FOREIGN = {
    "q_norm": "a norm per query head (Qwen3's), which our head has not",
    "k_norm": "a norm per key head (Qwen3's), which our head has not",
    "mask_hidden": "a parallel-drafting head (P-EAGLE), which our decoder has not",
    "_proj.bias": "a bias in attention or MLP, which our head has not",
    "kv_a_proj": "multi-head latent attention, which our head has not",
    "weight_scale": "quantised weights; import the head as it was before",
}


@dataclass(frozen=True)
class Imported:
    """path: of the head's folder; kind: "eagle1", "eagle3" or "medusa"; notes: what was decided about it."""

    path: Path
    kind: str
    notes: tuple[str, ...]


@dataclass
class _Given:
    """Somebody's folder: its configuration, the part that describes the transformer, tensors by our names, and their names."""

    folder: Path
    config: Fields
    inner: Fields
    tensors: dict[str, Tensor]
    spelt: dict[str, str]
    notes: list[str]


def import_draft(
    folder: str | Path,
    target: str | Path | Target,
    out: str | Path,
    *,
    nested_ids: Literal["output", "input"] = "output",
) -> Imported:
    """Turn the head in `folder` into one of ours at `out`, for the target that it was trained for.

    nested_ids: what ids below `eagle_config` count where there are none at the top level: outputs of blocks (SGLang, ModelOpt,
    SpecForge) or their inputs (vLLM reads them so). Raises UserError naming whatever is missing, extra, of another shape, of
    another target, or beyond our head.
    """
    folder, out = Path(folder), Path(out)
    check_folder_place(out)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out}: is not empty; give a new folder")
    given = _read(folder)
    target = target if isinstance(target, Target) else Target.load(target)
    kind = _kind(given)
    config: Any  # MedusaConfig or EagleConfig
    try:
        config, vocabulary = _medusa(given, target) if kind == "medusa" else _eagle(given, target, kind, nested_ids)
        _strict(given, config, vocabulary, target)
    except (
        ArithmeticError,
        RuntimeError,
        TypeError,
        ValueError,
        KeyError,
        StrictDataclassError,
    ) as error:  # of layers made with values that no layer has
        raise UserError(f"{folder}/config.json: a value is impossible ({first_line(error)}); correct it") from error
    tensors = given.tensors | {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}

    def write(partial: Path) -> None:
        save_file({name: value.contiguous() for name, value in tensors.items()}, partial / WEIGHTS, {"format": "pt"})
        publish_json(partial / "config.json", asdict(config))

    publish_files(out, write)
    return Imported(out, kind, tuple(given.notes))


def _read(folder: Path) -> _Given:
    if not os.path.isdir(folder):  # pathlib's raises for a name too long
        raise UserError(f"{folder}: no such folder; name the folder of a published head")
    if head_kind(folder) is not None:
        raise UserError(f"{folder}: is a head of Draftsmith already; use the folder as it is")
    config = read_config(folder)
    speculators = config.get("speculators_model_type")
    if speculators not in (None, "eagle3"):
        raise UserError(
            f"{folder}/config.json: speculators_model_type {str(speculators)[:60]!r}; only eagle3 can be imported"
        )
    whole = Fields(f"{folder}/config.json", config)
    check_architectures(whole)
    inner = whole.inside("transformer_layer_config") if speculators else whole
    for fields in (whole, inner):
        if fields.values.get("quantization_config"):
            raise fields.wrong("quantization_config", "left out, for quantised heads cannot be imported")
    tensors: dict[str, Tensor] = {}
    spelt: dict[str, str] = {}
    for name, value in read_tensors(folder).items():
        # Older `transformers` stored RoPE's frequencies, which follow from the settings.
        if name.endswith("rotary_emb.inv_freq"):
            continue
        for part, reason in FOREIGN.items():
            if part in name:
                raise UserError(f"{folder}: {name} is of {reason}")
        ours = our_name(name)
        if ours in tensors:
            raise UserError(f"{folder}: {name} and {spelt[ours]} are the same tensor in two spellings; remove one")
        tensors[ours], spelt[ours] = value, name
    check_weights({spelt[name]: value for name, value in tensors.items()}, str(folder))
    return _Given(folder, whole, inner, tensors, spelt, [])


def _kind(given: _Given) -> str:
    names = given.tensors
    if given.config.values.get("model_type") == "medusa" or any(name.startswith("lm_heads.") for name in names):
        return "medusa"
    if given.config.values.get("speculators_model_type") or "draft_vocab_size" in given.config.values:
        return "eagle3"
    if any(name in names for name in ("layers.0.hidden_norm.weight", "norm.weight", "d2t")) and "fc.weight" in names:
        return "eagle3"
    if "fc.weight" in names:
        return "eagle1"
    raise UserError(
        f"{given.folder}: no fc.weight, so no EAGLE head; an ordinary LM needs no import: give the folder as distill.checkpoint, "
        "or to speculative_decode"
    )


def _medusa(given: _Given, target: Target) -> tuple[MedusaConfig, DraftVocabulary]:
    numbered = [name.split(".")[1] for name in given.tensors if name.startswith(("blocks.", "lm_heads."))]
    heads = len(set(numbered))
    if not heads or set(numbered) != set(map(str, range(heads))):
        raise UserError(
            f"{given.folder}: heads {listed(sorted(set(numbered))) or 'none'} have weights, not 0 and up; complete it"
        )
    config = medusa_config(heads, target, given.config)
    if "token_map" in given.tensors:
        raise UserError(f"{given.folder}: token_map is of Medusa heads with a reduced vocabulary; import those without")
    for i in range(heads):
        weight = given.tensors.get(f"blocks.{i}.weight")
        if weight is not None and f"blocks.{i}.bias" not in given.tensors:
            given.tensors[f"blocks.{i}.bias"] = torch.zeros_like(weight[:, 0])  # computes the same
            given.notes.append(f"blocks.{i}.bias is zero: the heads had none")
    return config, DraftVocabulary.all_of(target.vocabulary)


def _eagle(given: _Given, target: Target, kind: str, nested_ids: str) -> tuple[EagleConfig, DraftVocabulary]:
    tensors = given.tensors
    bias = tensors.get("fc.bias")
    if bias is not None and not bool(bias.any()):  # SGLang's EAGLE-1 has the parameter whether it was trained or not
        del tensors["fc.bias"]
        given.notes.append("fc.bias is zero and was left out")
    vocabulary = _vocabulary(given, target)
    config = eagle_config(
        given.config, given.inner, kind, target, vocabulary.size, "fc.bias" in tensors, nested_ids == "output"
    )
    if config.layers > len(tensors):  # so many need hours to be made, even without weights
        raise given.inner.wrong("num_hidden_layers", "the number of layers that have weights")
    _check_shared(given, target, kind, vocabulary)
    if "rope_theta" not in given.inner.values and not given.inner.values.get("rope_parameters"):
        given.notes.append("config.json says nothing of RoPE: base 10000 was taken, as engines do")
    if kind == "eagle3" and not _ids_given(given.config):
        given.notes.append(
            f"config.json names no fused states: the default was taken, outputs of blocks {list(config.taps)}"
        )
    return config, vocabulary


def _ids_given(config: Fields) -> bool:
    return bool(config.ids(IDS) or config.inside("eagle_config").ids(IDS))


def _vocabulary(given: _Given, target: Target) -> DraftVocabulary:
    """The head's own mapping, kept as it is; the whole vocabulary where there is none."""
    stated = given.inner.whole("vocab_size")
    if stated != target.vocabulary:
        raise UserError(
            f"{given.inner.place}: vocab_size {stated}, the target has {target.vocabulary} tokens; name the target that the head"
            " was trained for"
        )
    d2t, t2d = given.tensors.pop("d2t", None), given.tensors.pop("t2d", None)
    size = given.config.whole("draft_vocab_size", target.vocabulary)
    for name, value, rows in (("d2t", d2t, size), ("t2d", t2d, target.vocabulary)):
        if value is not None and tuple(value.shape) != (rows,):
            raise UserError(f"{given.folder}: {name}: shape {tuple(value.shape)}, not {(rows,)}; get the weights again")
        if value is not None and (value.is_floating_point() or value.is_complex()):
            raise UserError(f"{given.folder}: {name}: type {value.dtype}, not whole numbers; get the weights again")
    if d2t is None:
        if size != target.vocabulary:
            raise UserError(
                f"{given.folder}: d2t: missing, although the head says {size} of {target.vocabulary} tokens; get the weights again"
            )
        if t2d is not None and not bool(t2d.all()):
            raise UserError(
                f"{given.folder}: t2d: not true everywhere, although there is no d2t and the head says all {size} tokens; get"
                " the weights again"
            )
        return DraftVocabulary.all_of(target.vocabulary)
    if wrong := check_maps(d2t, t2d, target.vocabulary):
        raise UserError(f"{given.folder}: {wrong[0]}; get the weights again")
    return DraftVocabulary(d2t.long() + torch.arange(len(d2t)), target.vocabulary)


def _check_shared(given: _Given, target: Target, kind: str, vocabulary: DraftVocabulary) -> None:
    """Embedding and output head: the target's own are left out, others cannot be imported where ours has no place for them."""
    embedding, output = (
        module.weight.detach().cpu()
        for module in (target.model.get_input_embeddings(), target.model.get_output_embeddings())
    )
    own = given.tensors.pop("embed_tokens.weight", None)
    if own is not None and not (own.shape == embedding.shape and torch.equal(own, embedding.to(own.dtype))):
        raise UserError(
            f"{given.folder}: {given.spelt['embed_tokens.weight']} differs from the target's embedding, and our heads use the"
            " target's; name the target that it was trained for"
        )
    if kind == "eagle1":
        head = given.tensors.pop("lm_head.weight", None)
        if head is not None and not (head.shape == output.shape and torch.equal(head, output.to(head.dtype))):
            raise UserError(
                f"{given.folder}: {given.spelt['lm_head.weight']} differs from the target's output head, which EAGLE-1 is read by"
            )
    elif "lm_head.weight" not in given.tensors:
        fc = given.tensors.get("fc.weight")
        rows = output[vocabulary.target_ids]
        given.tensors["lm_head.weight"] = rows.to(rows.dtype if fc is None else fc.dtype).clone()
        given.notes.append("there is no lm_head: the target's rows were copied, and are the head's own from here on")


def _strict(given: _Given, config: Any, vocabulary: DraftVocabulary, target: Target) -> None:
    """Raises UserError naming every tensor that is missing, extra or of another shape, as the folder spells it."""
    with torch.device("meta"):
        head = MedusaHeads(config, vocabulary) if config.kind == "medusa" else EagleHead(config, vocabulary, target)
    expected = {name: Expected(tuple(value.shape), "float") for name, value in head.state_dict().items()}
    spell = {
        name: given.spelt.get(name) or their_name(name, given.spelt.values())
        for name in expected.keys() | given.tensors.keys()
    }
    tensors = {spell[name]: value for name, value in given.tensors.items()}
    if wrong := check_tensors(tensors, {spell[name]: wanted for name, wanted in expected.items()}):
        raise UserError(f"{given.folder}: {listed(wrong)}; get the head again, or restore its config.json")
