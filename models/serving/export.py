"""Export a trained draft as the folder that an engine loads: weights, `config.json`, tokenizer where needed, and a README.

Tensors are copied bit for bit under the engine's names; what an engine cannot serve is refused by name; the finished folder is
held against the engine's layout before it appears. Knows no training and no decoding.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.files import check_folder_place, publish_files, publish_json, publish_text
from draftsmith.models.draft import DraftLM, padded_to
from draftsmith.models.eagle import KINDS, EagleHead
from draftsmith.models.fields import Fields
from draftsmith.models.heads import check_weights, head_kind
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.serving.check import WEIGHTS, check_folder, read_config, stored_types
from draftsmith.models.serving.configs import absolute, engine_config, rope_keys
from draftsmith.models.serving.layouts import FORMATS
from draftsmith.models.serving.names import engine_name
from draftsmith.models.serving.readme import MARK, About, drafted, read_results, text, trtllm_yaml
from draftsmith.models.serving.refusals import refuse
from draftsmith.models.target import Target, load_model

CONFIDENCE = "confidence_head."
TARGETS = "the target's own, not in this folder"


def export_draft(
    draft_folder: str | Path,
    target: str | Path | Target,
    fmt: str,
    out: str | Path,
    *,
    results: str | Path | None = None,
) -> Path:
    """Write the draft in `draft_folder` (an EAGLE head, Medusa heads or a draft LM) to `out` as the engine `fmt` loads it.

    results: `eval/<draft>.json` of its evaluation, for the README and for the number of drafted tokens. Returns `out`. Raises
    UserError for a draft that cannot be read or that the engine cannot serve, and for an `out` that holds something else.
    """
    source, place = Path(draft_folder), Path(out)
    if fmt not in FORMATS:
        raise UserError(f"--to {fmt}: no such format; there are {', '.join(FORMATS)}")
    check_folder_place(place)
    if place.exists() and any(place.iterdir()) and not _is_export(place):
        raise UserError(f"{place}: holds something that is no export; give an empty or a new folder")
    model = target if isinstance(target, Target) else Target.load(target)
    measured = None if results is None else read_results(Path(results))
    draft = _load(source, model)
    refuse(draft, model, fmt, str(source))
    written: set[str] = set()

    def write(folder: Path) -> None:
        if isinstance(draft, DraftLM):
            notes = _write_lm(source, model, folder, drafted(measured))
        else:
            notes = _write_head(source, draft, model, fmt, folder, drafted(measured))
        _describe(source, draft, model, fmt, folder, place, measured, notes)
        written.update(path.name for path in folder.iterdir())

    publish_files(place, write)
    for path in place.iterdir():  # a file of an earlier export must not stay beside the new ones
        if path.is_file() and path.name not in written:
            path.unlink()
    return place


def _is_export(place: Path) -> bool:
    readme = place / "README.md"
    return readme.is_file() and MARK in readme.read_text(encoding="utf-8", errors="replace")


def _load(source: Path, target: Target) -> EagleHead | MedusaHeads | DraftLM:
    """The draft in a folder, whatever it is. Raises UserError where it cannot be read."""
    kind = head_kind(source)
    if kind is None:
        return _load_lm(source, target)
    if kind == "medusa":
        return MedusaHeads.load(source, target)
    if kind in KINDS:
        return EagleHead.load(source, target)
    raise UserError(
        f"{source}/config.json: kind {kind!r} is no head of this version; there are medusa, {', '.join(KINDS)}"
    )


def _load_lm(source: Path, target: Target) -> DraftLM:
    """An ordinary LM, with what its loader takes without a word refused."""
    stored_types(source)
    draft = DraftLM.load(source, target)
    config = Fields(f"{source}/config.json", read_config(source))
    for key in ("max_position_embeddings", "n_positions"):
        config.whole(key, 1)
    check_weights(draft.model.state_dict(), str(source))
    return draft


def _write_head(
    source: Path, head: EagleHead | MedusaHeads, target: Target, fmt: str, folder: Path, K: int
) -> tuple[str, ...]:
    """A head's weights and configuration. Returns notes."""
    stored, config = load_file(source / WEIGHTS), head.config
    if fmt == "transformers":
        for name in (WEIGHTS, "config.json"):
            shutil.copyfile(source / name, folder / name)
        return ("transformers has no classes for heads: the layout is Draftsmith's own",)
    layers = 1 if isinstance(head, MedusaHeads) else head.config.layers
    named = {name: value for name, value in stored.items() if not name.startswith(CONFIDENCE)}
    if head.vocabulary.full:  # the maps are the identity, and vLLM has no place for them then
        named = {name: value for name, value in named.items() if name not in ("d2t", "t2d")}
    tensors = {engine_name(name, fmt, config.kind, layers): value for name, value in named.items()}
    notes = []
    if len(named) < len(stored) and any(name.startswith(CONFIDENCE) for name in stored):
        notes.append("the confidence output was left out: no engine reads one; drafted tokens are the same without it")
    if fmt == "sglang" and config.kind == "eagle1" and "fc.bias" not in tensors:
        tensors["fc.bias"] = torch.zeros_like(tensors["fc.weight"][:, 0])
        notes.append("fc.bias is zero: SGLang has such a parameter, and leaves it random where the file has none")
    if config.kind == "eagle3" and not target.plain_embedding:
        notes.append(
            "the target scales its embeddings, the engine joins them as stored: equal after the norm but for its epsilon"
        )
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    publish_json(folder / "config.json", engine_config(config, fmt, target, _dtype(source, tensors), K))
    if wrong := check_folder(folder, fmt, config.kind, target.blocks):
        raise RuntimeError(f"export to {fmt} is not of its layout: {'; '.join(wrong)}")
    return tuple(notes)


def _dtype(source: Path, tensors: Mapping[str, Tensor]) -> str:
    found = {str(t.dtype).removeprefix("torch.") for t in tensors.values() if t.is_floating_point()}
    if len(found) != 1:
        raise UserError(f"{source}/{WEIGHTS}: tensors of several types ({', '.join(sorted(found))}); store them in one")
    return found.pop()


def _write_lm(source: Path, target: Target, folder: Path, K: int) -> tuple[str, ...]:
    """An ordinary `transformers` folder with as many tokens as the target, its RoPE settings in old and new keys. Returns notes."""
    types, notes = stored_types(source) - {"bool", "int64"}, []
    stored = types.pop() if len(types) == 1 else "float32"  # in which all of several types are exact
    model = load_model(str(source), stored)
    rows = model.get_output_embeddings().weight.shape[0]
    if rows != target.vocabulary:
        model = padded_to(model, target, str(source))
        notes.append(f"{target.vocabulary - rows} rows of zeros were added, up to the target's vocabulary")
    model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    written = read_config(folder)
    if isinstance(parameters := written.get("rope_parameters"), dict) and "rope_type" in parameters:
        written |= rope_keys(parameters)
    written |= {"dtype": stored, "torch_dtype": stored}
    written.pop("draft_vocab_size", None)  # TensorRT-LLM takes a folder that has it for an EAGLE-3 head
    publish_json(folder / "config.json", written)
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    # transformers reads these of the draft; a threshold of 0 always drafts K tokens, as in our evaluation.
    generation |= {"num_assistant_tokens": K, "num_assistant_tokens_schedule": "constant"}
    publish_json(path, generation | {"assistant_confidence_threshold": 0.0})
    return tuple(notes)


def _describe(
    source: Path,
    draft: EagleHead | MedusaHeads | DraftLM,
    target: Target,
    fmt: str,
    folder: Path,
    out: Path,
    results: Mapping[str, Any] | None,
    notes: tuple[str, ...],
) -> None:
    """README.md, and the settings file of engines that take one."""
    tensors = [value for path in sorted(folder.glob("*.safetensors")) for value in load_file(path).values()]
    K = drafted(results)
    if isinstance(draft, MedusaHeads):
        K = draft.config.heads  # vLLM drafts one token per head, whatever number it is told
    about = About(
        name=source.name,
        kind="draft-lm" if isinstance(draft, DraftLM) else draft.config.kind,
        fmt=fmt,
        folder=str(out.resolve()),
        target=absolute(target.path) or "TARGET",
        K=K,
        taps=draft.config.taps if isinstance(draft, EagleHead) else (),
        owned=_owned(draft),
        size=sum(value.numel() * value.element_size() for value in tensors),
        tensors=len(tensors),
        notes=notes,
        results=results,
    )
    publish_text(folder / "README.md", text(about))
    if fmt == "trtllm":
        publish_text(folder / "speculative.yaml", trtllm_yaml(about))


def _owned(draft: EagleHead | MedusaHeads | DraftLM) -> dict[str, str]:
    if isinstance(draft, DraftLM):
        tied = draft.model.get_input_embeddings().weight is draft.model.get_output_embeddings().weight
        return {"Embedding": "its own", "Output head": "its own embedding (tied)" if tied else "its own"}
    if isinstance(draft, MedusaHeads):
        return {"Embedding": "none", "Output heads": "its own"}
    return {"Embedding": TARGETS, "Output head": "its own" if draft.lm_head is not None else TARGETS}
