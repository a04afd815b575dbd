"""What all recipes of the peers' benchmark learn from: rows, the target's states of them, and the order of the steps, in files.

Written with Draftsmith, read in the peers' own environments, which cannot import it. Knows no recipe.
"""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from draftsmith.config import load_config
from draftsmith.data.cache.reader import CacheReader
from draftsmith.data.rows import Row, Rows
from draftsmith.files import publish, publish_json
from draftsmith.models.eagle import EagleHead
from draftsmith.models.target import Target
from draftsmith.train.eagle import draft_vocabulary, new_head
from draftsmith.train.feeder import batch_plan
from draftsmith.train.settings import EagleTrainSettings

HEAD = "eagle3"  # the head of the run whose recipe is ours
CHOOSING = 4  # of this many held-out rows in turn, the first is for choosing: weights, learning rates


def recipe(run: Path, tokens: int) -> EagleTrainSettings:
    """The run's own settings of its EAGLE-3 head, for so many tokens."""
    settings = load_config(run / "resolved.yaml").config.eagle[HEAD]
    return settings.model_copy(update={"tokens": tokens})


def held_out(run: Path) -> tuple[list[Row], list[Row]]:
    """The held-out rows by which weights and learning rates are chosen, and those whose prompts are decoded in the end."""
    rows = list(Rows.open(run / "rows", "held_out"))
    chosen = [row for i, row in enumerate(rows) if i % CHOOSING == 0]
    return chosen, [row for i, row in enumerate(rows) if i % CHOOSING]


def write_states(run: Path, folder: Path, tokens: int, seeds: list[int]) -> None:
    """Everything that a recipe reads, unless it is there for these seeds.

    states.safetensors: of all rows that any seed uses, one behind the other: token_ids int64 [N], supervised bool [N], taps bf16
    [N, A, W] as in the run's cache, before_norm and last float32 [N, W] (the last state before and after the final norm), offsets
    int64 [rows + 1]. vocabulary.safetensors: d2t int64 [V_d] (offsets), t2d bool [V]. about.json: sizes, the target's folder, and
    for each seed the rows of every optimiser step, which are those that our trainer takes.
    """
    done = folder / "about.json"
    if done.is_file() and {str(seed) for seed in seeds} <= json.loads(done.read_text(encoding="utf-8"))["steps"].keys():
        return
    target = Target.load(run / "target")
    reader, settings = CacheReader(run / "cache", target.fingerprint()), recipe(run, tokens)
    plans = {seed: batch_plan(reader.lengths, settings, seed) for seed in seeds}
    used = sorted({row for plan in plans.values() for step in plan for micro in step for row in micro})
    place = {row: i for i, row in enumerate(used)}
    steps = {seed: [[place[row] for micro in step for row in micro] for step in plan] for seed, plan in plans.items()}
    vocabulary = draft_vocabulary(reader, target, settings.draft_vocabulary)
    head = new_head(target, reader.taps, vocabulary, settings)  # its sizes are those that every recipe trains
    assert isinstance(head, EagleHead)
    config = head.config
    folder.mkdir(parents=True, exist_ok=True)
    states = states_of(target, reader, used)
    publish(folder / "states.safetensors", lambda path: save_file(states, path))
    maps = {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}
    publish(folder / "vocabulary.safetensors", lambda path: save_file(maps, path))
    about = {
        "target": str((run / "target").resolve()),
        "taps": list(config.taps),
        "kv_heads": config.kv_heads,
        "intermediate": config.intermediate,
        "draft_vocabulary": config.draft_vocabulary,
        "rows": len(used),
        "steps": steps,
    }
    publish_json(folder / "about.json", about)


@torch.no_grad()
def states_of(target: Target, reader: CacheReader, rows: list[int]) -> dict[str, torch.Tensor]:
    """The tensors of states.safetensors (see `write_states`)."""
    parts: dict[str, list[torch.Tensor]] = {}
    offsets = [0]
    for index in rows:
        row = reader[index]
        ids = torch.from_numpy(np.asarray(row.token_ids, dtype=np.int64))
        out = target.forward(ids[None], (target.blocks - 1,), want_logits=False)
        assert out.taps is not None
        found = {
            "token_ids": ids,
            "supervised": torch.from_numpy(np.asarray(row.supervised, dtype=bool)),
            "taps": torch.from_numpy(row.taps).bfloat16(),
            "before_norm": out.taps[0, :, 0].float(),
            "last": out.last[0].float(),
        }
        for name, tensor in found.items():
            parts.setdefault(name, []).append(tensor)
        offsets.append(offsets[-1] + len(ids))
    return {name: torch.cat(tensors).contiguous() for name, tensors in parts.items()} | {
        "offsets": torch.tensor(offsets)
    }
