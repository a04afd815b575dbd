"""What a training step is reported as: the values of its line in training.jsonl, and those on the terminal.

Knows sums of a step; does not know where they go.
"""

import resource

import numpy as np
import torch

from draftsmith.train.objectives import Sums


def note(record: dict[str, float]) -> str:
    """What the terminal shows of a step."""
    return (
        f"loss {record['loss']:.3f}  acceptance {record['expected_acceptance']:.3f}  "
        f"data wait {record['data_wait']:.0%}  {record['memory_gb']:.1f} GB"
    )


def measured(loss: float, sums: Sums, learning_rate: float, rate: float) -> dict[str, float]:
    """The values of a step by their names in training.jsonl. rate: tokens/s."""
    steps = (sums.accepted / sums.count.clamp(min=1)).tolist()
    return {
        "loss": loss,
        "expected_acceptance": steps[0],
        **{f"expected_acceptance/{k}": value for k, value in enumerate(steps) if len(steps) > 1},
        "learning_rate": learning_rate,
        "tokens_per_second": rate,
        "memory_gb": _memory_gb(),
    }


def _memory_gb() -> float:
    """The most that this process has held: on its accelerator where it uses one, else in main memory."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def run_length(acceptance: list[float]) -> float:
    """Expected accepted tokens of a chain whose positions accept independently: Σ_k Π_{i≤k} α_i. Picks the best weights."""
    return float(np.cumprod(acceptance).sum())
