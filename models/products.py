"""Linear layers over a handful of tokens on a CPU: the same product, multiplied the other way round.

What a verify costs on a CPU depends on how x Wᵀ is asked for. On AMD processors the library that torch multiplies with spreads it
over threads badly for 2 to 10 rows of x, and well for (W xᵀ)ᵀ, which is the same product: a verify of 6 tokens took 13 to 15 % less
time (demo target and its heavy twin, two cores, both ways in turn in one process). On other processors nothing was measured, and
nothing is changed.

Knows no model.
"""

import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = range(2, 11)  # for one row both ways are one matrix-vector product; for more than 10 they cost about the same


class Linear(nn.Linear):
    """`nn.Linear`, with its product the other way round for float32 rows on a CPU that are in `ROWS`."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] → [..., out]."""
        if not x.is_cpu or x.numel() // self.in_features not in ROWS or self.weight.dtype is not torch.float32:
            return F.linear(x, self.weight, self.bias)
        rows = x.reshape(-1, self.in_features)
        out = torch.mm(self.weight, rows.T).T.contiguous().view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


def few_rows_fast(module: nn.Module) -> None:
    """Let the linear layers of a module be `Linear` where this machine gains by it. Their weights, names and states stay theirs."""
    if not _gains():
        return
    for layer in module.modules():
        if type(layer) is nn.Linear:  # not of what quantises or adapts it
            layer.__class__ = Linear


@functools.cache
def _gains() -> bool:
    about = Path("/proc/cpuinfo")
    amd = about.is_file() and "AuthenticAMD" in about.read_text(encoding="utf-8")
    return amd and torch.backends.mkl.is_available()
