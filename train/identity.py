"""What a checkpoint must agree in with the run that continues it."""

import math
from typing import Any

import numpy as np
import xxhash

from draftsmith.train.checkpoint import trained
from draftsmith.train.feeder import Source
from draftsmith.train.held_out import HeldOut
from draftsmith.train.objectives import Objective
from draftsmith.train.settings import TrainSettings

START = "start of the weights"  # in the identity of a run
SPEED = {"checkpoint_every", "bad_rows"}  # settings that may change between an interrupted run and its resumption


def identity(
    objective: Objective, source: Source, held_out: HeldOut, settings: TrainSettings, seed: int
) -> dict[str, Any]:
    """Each part by the name that a refusal gives."""
    rows = xxhash.xxh3_64(np.ascontiguousarray(source.lengths).tobytes())
    rows.update(str(getattr(source, "identity", "")).encode())
    text = xxhash.xxh3_64()
    for batch in held_out.batches:
        text.update(batch.token_ids.cpu().numpy().tobytes())
    kept = {key: value for key, value in settings.model_dump(mode="json").items() if key not in SPEED}
    return {
        "objective": f"{type(objective).__name__}, {objective.steps} steps, decay {objective.decay}",
        **kept,
        "seed": seed,
        START: {name: float(weights.detach().norm()) for name, weights in trained(objective).items()},
        "vocabulary of the draft": xxhash.xxh3_64_hexdigest(objective.vocabulary.target_ids.cpu().numpy().tobytes()),
        "rows": rows.hexdigest(),
        "held-out rows": text.hexdigest(),
    }


def changed(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Names of the parts that differ."""
    return [key for key, value in wanted.items() if not _alike(key, found.get(key), value)]


def _alike(key: str, found: Any, wanted: Any) -> bool:
    """Equal; the norms of a start up to rounding, since one that is computed (as from singular vectors) depends on the number of
    threads in its last digits."""
    if key != START:
        return bool(found == wanted)
    same_names = isinstance(found, dict) and found.keys() == wanted.keys()
    return same_names and all(math.isclose(found[name], value, rel_tol=1e-4) for name, value in wanted.items())
