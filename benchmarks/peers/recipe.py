"""What the two training scripts of the peers share: their arguments, the states, the loop's clock, a probe of the trained head.

Imported in the peers' own environments: knows torch and safetensors, and nothing of Draftsmith.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@dataclass(frozen=True)
class States:
    """The files of `states.write_states`: sizes, draft vocabulary, and rows by number."""

    about: dict[str, Any]
    vocabulary: dict[str, Tensor]
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, folder: Path) -> "States":
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        return cls(about, load_file(folder / "vocabulary.safetensors"), load_file(folder / "states.safetensors"))

    def row(self, index: int) -> dict[str, Tensor]:
        """One row's tensors, T tokens each; taps float32 [T, A · W]."""
        start, end = self.tensors["offsets"][index : index + 2].tolist()
        row = {name: tensor[start:end] for name, tensor in self.tensors.items() if name != "offsets"}
        return row | {"taps": row["taps"].float().flatten(1)}

    def steps(self, seed: int) -> list[list[int]]:
        """The rows of every optimiser step."""
        return self.about["steps"][str(seed)]


def arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--states", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the trained head")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, help="learning rate instead of the recipe's default")
    return parser.parse_args()


class Clock:
    """Seconds of processor time of every optimiser step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def each(self, steps: list[list[int]]) -> Iterator[list[int]]:
        for step in steps:
            started = time.process_time()
            yield step
            self.seconds.append(time.process_time() - started)


def finish(out: Path, package: str, model: nn.Module, clock: Clock, losses: list[float], **settings: Any) -> None:
    """training.json: what the run came to, with all settings of the recipe, as its last file."""
    about = {
        "package": {package: metadata.version(package), "torch": metadata.version("torch")},
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "steps": len(clock.seconds),
        "seconds_per_step": sum(clock.seconds) / len(clock.seconds),
        "losses": losses,
        "settings": settings,
    }
    (out / "training.json").write_text(json.dumps(about, indent=1), encoding="utf-8")


def write_probe(out: Path, head: nn.Module, row: int, run: Callable[[], object]) -> None:
    """probe.safetensors: the draft logits [steps, slots, V_d] that the peer's own code computes for one row, read at its head."""
    seen: list[Tensor] = []
    hook = head.register_forward_hook(lambda _module, _inputs, output: seen.append(output.detach()[0].float()))
    with torch.no_grad():
        run()
    hook.remove()
    save_file({"logits": torch.stack(seen).contiguous(), "row": torch.tensor(row)}, out / "probe.safetensors")
