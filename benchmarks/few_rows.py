"""`make bench-few-rows`: what `models/few_rows.py` is worth on this machine.

Reads a finished run (runs/demo). A forward over n tokens behind 100 cached ones, on the run's target and on its heavy twin,
with the linear layers as torch has them and the other way round, in turn in one process; prints the medians.
"""

import argparse
import sys
import time
from pathlib import Path
from types import MethodType

import numpy as np
import torch
from torch import nn

from draftsmith.models.few_rows import FEW, forward
from draftsmith.models.target import Target
from draftsmith.serving import target_of

sys.path.insert(0, str(Path(__file__).parent))
from markdown import table
from twin import heavy_twin

ROWS, CONTEXT, ROUNDS = (1, 2, 4, 6, 8, FEW, 16, 32), 100, 21
WAYS = {"torch": nn.Linear.forward, "turned": forward}


@torch.inference_mode()
def seconds(target: Target) -> dict[tuple[str, int], list[float]]:
    """Of every way and number of rows the seconds of each round."""
    layers = [layer for layer in target.model.modules() if type(layer) is nn.Linear]
    cache = target.new_cache(1, CONTEXT + max(ROWS))
    target.forward(torch.arange(CONTEXT)[None] % target.usable, cache=cache, want_logits=False)
    cache.set_lengths(torch.tensor([CONTEXT]))
    found: dict[tuple[str, int], list[float]] = {(way, n): [] for way in WAYS for n in ROWS}
    for _ in range(ROUNDS):
        for way, n in found:
            for layer in layers:
                layer.forward = MethodType(WAYS[way], layer)
            started = time.perf_counter()
            target.forward(torch.full((1, n), 7), cache=cache)
            found[way, n].append(time.perf_counter() - started)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, nargs="?", default=Path("runs/demo"), help="a finished run")
    parser.add_argument("--threads", type=int, nargs="*", default=sorted({1, torch.get_num_threads()}))
    given = parser.parse_args()
    target = Target.load(target_of(given.run))
    for threads in given.threads:
        torch.set_num_threads(threads)
        for name, model in (("target", target), ("heavy twin", heavy_twin(target))):
            found = {key: 1e3 * float(np.median(values)) for key, values in seconds(model).items()}
            lines = [
                (
                    str(n),
                    f"{found['torch', n]:.2f}",
                    f"{found['turned', n]:.2f}",
                    f"{found['turned', n] / found['torch', n]:.2f}",
                )
                for n in ROWS
            ]
            print(f"{name}, {threads} threads, milliseconds\n\n{table(('rows', *WAYS, 'ratio'), lines)}\n", flush=True)


if __name__ == "__main__":
    main()
