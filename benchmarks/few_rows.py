"""`make bench-few-rows`: what `models/few_rows.py` is worth on this machine.

Reads a finished run (runs/demo). A forward over n tokens behind 100 cached ones, on the run's target and on its heavy twin,
with the linear layers as torch has them and the other way round, in turn in one process; prints the medians.
"""

import argparse
import sys
from pathlib import Path
from types import MethodType

import torch
from torch import nn

from draftsmith.models.few_rows import FEW, forward
from draftsmith.models.target import Target
from draftsmith.serving import target_of

sys.path.insert(0, str(Path(__file__).parent))
from decode_timing import Costs
from markdown import table
from twin import heavy_twin

ROWS, CONTEXT, ROUNDS = (1, 2, 4, 6, 8, FEW, 16, 32), 100, 15
WAYS = {"torch": nn.Linear.forward, "turned": forward}


def costs(target: Target) -> dict[str, Costs]:
    """Of each way the seconds of a forward over n tokens, the ways in turn."""
    layers = [layer for layer in target.model.modules() if type(layer) is nn.Linear]
    found = {way: Costs(target, ROWS) for way in WAYS}
    for _ in range(ROUNDS):
        for way, forward_of in WAYS.items():
            for layer in layers:
                layer.forward = MethodType(forward_of, layer)
            found[way].measure(CONTEXT, turns=1)
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
            found = costs(model)
            lines = []
            for n in ROWS:
                plain, turned = (1e3 * found[way].of(n) for way in WAYS)
                lines.append((str(n), f"{plain:.2f}", f"{turned:.2f}", f"{turned / plain:.2f}"))
            print(f"{name}, {threads} threads, milliseconds\n\n{table(('rows', *WAYS, 'ratio'), lines)}\n", flush=True)


if __name__ == "__main__":
    main()
