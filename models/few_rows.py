"""Linear layers over a handful of tokens on a CPU: the same product, multiplied the other way round.

What a verify costs on a CPU depends on how x Wᵀ is asked for. On the machine where this was measured (`make bench-few-rows`;
two cores of an AMD EPYC), the library that torch multiplies with spreads it over threads badly for 2 to 10 rows of x, and well
for (W xᵀ)ᵀ, which is the same product: with two threads a verify of 6 tokens took 13 to 15 % less time, on the demo's target
and on its heavy twin. On processors of other makers nothing was measured, and nothing is changed.

Knows no model.
"""

import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW = 10  # for one row both ways are one matrix-vector product; beyond this they cost about the same


class FewRowsLinear(nn.Linear):
    """`nn.Linear`, with its product the other way round for 2 to `FEW` float32 rows on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] → [..., out]."""
        rows = x.numel() // self.in_features
        if not 2 <= rows <= FEW or not (x.is_cpu and x.dtype is self.weight.dtype is torch.float32):
            return F.linear(x, self.weight, self.bias)
        if torch.is_autocast_enabled("cpu"):
            return F.linear(x, self.weight, self.bias)
        flat = x.reshape(rows, self.in_features)
        out = torch.mm(self.weight, flat.T).T.contiguous().view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


def few_rows_fast(module: nn.Module) -> None:
    """Let a module's float32 linear layers on a CPU be `FewRowsLinear` where this machine gains by it. Their weights, names and
    states stay theirs; layers that are more than linear, quantised or adapted ones, are left alone."""
    if not _gains():
        return
    for layer in module.modules():
        if type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and _of_cpu(layer.weight):
            layer.__class__ = FewRowsLinear


def _of_cpu(weight: Tensor) -> bool:
    return weight.is_cpu and weight.dtype is torch.float32


@functools.cache
def _gains() -> bool:
    about = Path("/proc/cpuinfo")
    amd = about.is_file() and "AuthenticAMD" in about.read_text(encoding="utf-8")
    return amd and torch.backends.mkl.is_available()
