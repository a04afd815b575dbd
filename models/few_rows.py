"""Linear layers over a handful of tokens on a CPU: the same product, multiplied the other way round.

What a verify costs on a CPU depends on how x Wᵀ is asked for. On the machine where this was measured (`make bench-few-rows`;
two cores of an AMD EPYC), the library that torch multiplies with spreads it over threads badly for 2 to 10 rows of x, and well
for (W xᵀ)ᵀ, which is the same product: with two threads a verify of 6 tokens took 13 to 16 % less time, on the demo's target
and on its heavy twin. On processors of other makers nothing was measured, and nothing is changed.

Knows no model.
"""

import functools
from pathlib import Path
from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW = 10  # for one row both ways are one matrix-vector product; beyond this they cost about the same


def few_rows_fast(module: nn.Module) -> None:
    """Let a module's float32 linear layers on a CPU multiply few rows the other way round, where this machine gains by it.

    They get a `forward` of their own, beside their class's: type, weights, names, copies and files stay what they were. Layers that
    are more than linear, quantised or adapted ones, are left alone.
    """
    if not _gains():
        return
    for layer in module.modules():
        if type(layer) is nn.Linear and _plain(layer.weight):
            layer.forward = MethodType(forward, layer)  # type: ignore[method-assign]  # a copy's is bound to the copy


def forward(self: nn.Linear, x: Tensor) -> Tensor:
    """x [..., in] → [..., out]. Named as what it replaces, so that a pickle finds the class's own."""
    rows = x.numel() // max(self.in_features, 1)
    if 2 <= rows <= FEW and _plain(x) and _plain(self.weight) and not _watched():
        flat = x.reshape(rows, self.in_features)
        out = torch.mm(self.weight, flat.T).T.contiguous().view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias
    return F.linear(x, self.weight, self.bias)


def _plain(tensor: Tensor) -> bool:
    """Whether it is what it says: float32 on a CPU, and nothing that only behaves so."""
    kind = type(tensor)
    return (
        tensor.is_cpu
        and tensor.dtype is torch.float32
        and (kind is Tensor or kind is nn.Parameter)
        and not tensor.is_nested
    )


def _watched() -> bool:
    """Whether another type is to be computed in, or the products are recorded to be replayed with another number of rows."""
    return torch.is_autocast_enabled("cpu") or torch.jit.is_tracing() or torch.compiler.is_compiling()


@functools.cache
def _gains() -> bool:
    about = Path("/proc/cpuinfo")
    amd = about.is_file() and "AuthenticAMD" in about.read_text(encoding="utf-8")
    return amd and torch.backends.mkl.is_available()
