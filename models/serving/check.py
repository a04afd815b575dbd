"""The strict checker: holds an exported folder against the layout of its engine, tensor by tensor and key by key.

It reads the folder alone, as the engine will. Engines ignore unknown names, leave missing tensors at random values and drop biases
without a word, so nothing here is a warning. Knows nothing of our own heads.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftsmith.errors import UserError, first_line, listed
from draftsmith.models.serving.layouts import IDS, LAYOUTS, Expected, Layout, expand

WEIGHTS = "model.safetensors"
#: safetensors' names of what an LM that is not quantised holds, and torch's.
STORED = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool", "I64": "int64"}
INDEX = "model.safetensors.index.json"


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a folder. Raises UserError where there is none or it is no object."""
    return _read_object(folder / "config.json", "name the folder of a draft")


def _read_object(path: Path, remedy: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else first_line(error)
        raise UserError(f"{path}: not readable as JSON in UTF-8 ({reason}); {remedy}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: holds no object; {remedy}")
    return found


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files. Raises UserError for pickles alone, for none, for damaged files, and where an
    index says that the files are others."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        if pickles := sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]):
            raise UserError(
                f"{pickles[0]}: a pickle, which can run any code and is never loaded; if you trust its author, convert it to"
                " model.safetensors: safetensors.torch.save_file(torch.load(path, weights_only=True), 'model.safetensors')"
            )
        raise UserError(f"{folder}: no *.safetensors; name the folder of a draft")
    found: dict[str, Tensor] = {}
    places: dict[str, str] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as reader:
                tensors = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, RuntimeError) as error:
            raise UserError(f"{path}: not readable ({error}); download or export it again") from error
        if twice := sorted(found.keys() & tensors.keys()):
            raise UserError(f"{path}: {twice[0]} is in another file of the folder, too; keep one of them")
        found |= tensors
        places |= dict.fromkeys(tensors, path.name)
    _check_index(folder, places)
    return found


def stored_types(folder: Path) -> set[str]:
    """The types of an LM's tensors, such as "bfloat16". Raises UserError where its weights are quantised (loaded without their
    scales, they would be other numbers), and where its index names other files than there are."""
    places: dict[str, str] = {}
    found: set[str] = set()
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as reader:
                types = {name: reader.get_slice(name).get_dtype() for name in reader.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, RuntimeError) as error:
            raise UserError(f"{path}: not readable ({first_line(error)}); download or train it again") from error
        places |= dict.fromkeys(types, path.name)
        for name, kind in types.items():
            if kind not in STORED:
                raise UserError(
                    f"{path}: {name} is stored as {kind}: quantised weights; take the draft as it was before"
                )
            found.add(STORED[kind])
    _check_index(folder, places, all_named=False)  # another copy of the weights may lie beside them
    return found


def _check_index(folder: Path, places: Mapping[str, str], all_named: bool = True) -> None:
    """Raises UserError where the folder's index, if it has one, names other files or other tensors than there are. places: the file
    of each tensor; all_named: whether each must be in the index."""
    path = folder / INDEX
    if not (path.exists() or path.is_symlink()):
        return
    said = _read_object(path, "download it again, or remove it where there is one file of weights").get("weight_map")
    if not isinstance(said, dict) or not all(isinstance(file, str) for file in said.values()):
        raise UserError(f"{path}: weight_map is no object of file names; download it again")
    files = set(places.values())
    wrong = [f"{file} is not here" for file in sorted(set(said.values()) - files)]
    if not wrong:
        wrong = [f"{name} is not in {file}" for name, file in said.items() if places.get(name) != file]
        wrong += [f"{name} of {file} is not named" for name, file in places.items() if all_named and name not in said]
    if wrong:
        raise UserError(
            f"{path}: {listed(wrong, 3)}; download the whole folder again, or remove an index that is not its own"
        )


def check_folder(folder: Path, fmt: str, kind: str, blocks: int) -> list[str]:
    """What is wrong with a head's folder for an engine, one line each. blocks: of the target."""
    layout = LAYOUTS[fmt, kind]
    config, tensors = read_config(folder), read_tensors(folder)
    inner = config.get(layout.nested, {}) if layout.nested else config
    wrong = _check_keys(config, inner, layout)
    if wrong:
        return wrong
    sizes, flags = sizes_of(config, inner, kind)
    wrong = check_tensors(tensors, expand(layout, sizes, flags))
    wrong += _check_dtype(tensors, config, inner)
    if kind == "eagle3":
        wrong += _check_ids(config, inner, blocks)
        if not wrong and flags["pruned"]:
            wrong += check_maps(tensors["d2t"], tensors["t2d"], sizes["V"])
    return wrong


def sizes_of(config: Mapping[str, Any], inner: Mapping[str, Any], kind: str) -> tuple[dict[str, int], dict[str, bool]]:
    """The letters of `draftsmith.models.serving.layouts`, and the flags, that a configuration states."""
    if kind == "medusa":
        return {"W": config["hidden_size"], "V": config["vocab_size"], "heads": config["num_heads"]}, {}
    width = inner["hidden_size"]
    sizes = {
        "W": config.get("target_hidden_size") or width,
        "H": width,
        "V": inner["vocab_size"],
        "D": config.get("draft_vocab_size") or inner["vocab_size"],
        "A": inner.get("num_aux_hidden_states") or 3,
        "Q": inner["num_attention_heads"] * inner["head_dim"],
        "KV": inner["num_key_value_heads"] * inner["head_dim"],
        "I": inner["intermediate_size"],
        "layers": inner["num_hidden_layers"],
    }
    flags = {name: bool(config.get(name, False)) for name in ("fc_norm", "norm_before_fc")}
    return sizes, flags | {"pruned": sizes["D"] != sizes["V"]}


def check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, Expected]) -> list[str]:
    """Every missing, extra or misshapen tensor, by its name."""
    wrong = [f"{name}: missing" for name in sorted(expected.keys() - tensors.keys())]
    wrong += [f"{name}: not of this layout" for name in sorted(tensors.keys() - expected.keys())]
    for name in sorted(expected.keys() & tensors.keys()):
        found, wanted = tensors[name], expected[name]
        if tuple(found.shape) != wanted.shape:
            wrong.append(f"{name}: shape {tuple(found.shape)}, not {wanted.shape}")
        kind = "float" if found.is_floating_point() else str(found.dtype).removeprefix("torch.")
        if kind != wanted.dtype:
            wrong.append(f"{name}: type {kind}, not {wanted.dtype}")
    return wrong


def check_maps(d2t: Tensor, t2d: Tensor | None, target_size: int) -> list[str]:
    """The vocabulary's maps: d2t an offset whose target ids rise strictly within the target's, t2d true exactly there."""
    ids = d2t.long() + torch.arange(len(d2t))
    if bool((ids.diff() <= 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= target_size:
        return [f"d2t: i + d2t[i] must rise strictly within 0 … {target_size - 1}; absolute ids are no offsets"]
    if t2d is not None:
        expected = torch.zeros(target_size, dtype=torch.bool)
        expected[ids] = True
        if not torch.equal(t2d.bool(), expected):
            return ["t2d: is not true exactly at the ids of d2t"]
    return []


def _check_keys(config: Mapping[str, Any], inner: Mapping[str, Any], layout: Layout) -> list[str]:
    wrong = [f"config.json: {key} is missing" for key in layout.keys if key not in config]
    wrong += [f"config.json: {layout.nested}.{key} is missing" for key in layout.nested_keys if key not in inner]
    wrong += [f"config.json: {key} must not be there" for key in layout.absent if key in config or key in inner]
    for place, values in ((config, layout.values), (inner, layout.nested_values)):
        wrong += [
            f"config.json: {key} is {place.get(key)!r}, not {value!r}"
            for key, value in values.items()
            if key not in place or place[key] != value
        ]
    if (
        "target_hidden_size" in config
        and not layout.nested
        and config["target_hidden_size"] == config.get("hidden_size")
    ):
        wrong.append("config.json: target_hidden_size is written although it equals hidden_size")
    return wrong


def _check_dtype(tensors: Mapping[str, Tensor], config: Mapping[str, Any], inner: Mapping[str, Any]) -> list[str]:
    stored = {str(t.dtype).removeprefix("torch.") for t in tensors.values() if t.is_floating_point()}
    stated = {place[key] for place in (config, inner) for key in ("torch_dtype", "dtype") if key in place}
    return (
        []
        if stored == stated and len(stored) == 1
        else [f"config.json: states {sorted(stated)}, the tensors are {sorted(stored)}"]
    )


def _check_ids(config: Mapping[str, Any], inner: Mapping[str, Any], blocks: int) -> list[str]:
    ids, wrong = list(config[IDS]), []
    if ids != sorted(set(ids)) or ids[0] < 1 or ids[-1] > blocks:
        wrong.append(f"config.json: {IDS} {ids} must rise within 1 … {blocks}")
    if len(ids) != inner.get("num_aux_hidden_states"):
        wrong.append(
            f"config.json: {IDS} has {len(ids)} ids, but num_aux_hidden_states {inner.get('num_aux_hidden_states')}"
        )
    nested = config.get("eagle_config")
    if nested is not None and list(nested.get(IDS, [])) != [i - 1 for i in ids]:
        wrong.append(f"config.json: eagle_config.{IDS} {nested.get(IDS)} must be one less than {ids}")
    return wrong
