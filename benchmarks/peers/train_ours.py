"""Train one EAGLE-3 head with the recipe of a finished run, from its cache, as `draftsmith train-eagle` does."""

import argparse
import json
import time
from pathlib import Path

import torch
from states import held_out, recipe

from draftsmith import __version__
from draftsmith.data.cache.reader import CacheReader
from draftsmith.models.target import Target
from draftsmith.train.eagle import train_eagle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the trained head")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--change", action="append", default=[], help="KEY=JSON of the recipe, for ablations")
    given = parser.parse_args()
    torch.set_num_threads(1)
    target = Target.load(given.run / "target")
    reader, settings = CacheReader(given.run / "cache", target.fingerprint()), recipe(given.run, given.tokens)
    changes = {key: json.loads(value) for key, _, value in (change.partition("=") for change in given.change)}
    settings = type(settings).model_validate(settings.model_dump() | changes)
    started = time.process_time()
    summary = train_eagle(target, reader, held_out(given.run)[0], settings, given.out, given.seed)
    seconds = time.process_time() - started
    about = {
        "package": {"draftsmith": __version__, "torch": torch.__version__},
        "steps": summary.steps,
        "seconds_per_step": seconds / summary.steps,  # the two validations included
        "settings": settings.model_dump(mode="json"),
    }
    (given.out / "training.json").write_text(json.dumps(about, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
