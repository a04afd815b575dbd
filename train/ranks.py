"""Several processes that train as one: how the model is replicated or sharded, and sums over all ranks.

Processes are started and described by `accelerate launch`; DDP replicates, FSDP2 shards the masters and the optimiser state.
Knows neither losses nor data. FSDP2 is applied to the whole model as one unit: a draft is one or a few blocks and its fused head
reads `lm_head.weight` outside of any module's forward, which inner units would have put away again.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from draftsmith.errors import UserError

PLAIN = {"NO", "MULTI_CPU", "MULTI_GPU"}


class Ranks:
    """This process among its peers. `index`: from 0; `main`: the one that writes and tracks."""

    def __init__(self, device: torch.device, precision: str) -> None:
        """Raises UserError for a way of `accelerate` that drafts are not trained in."""
        self.accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=precision)
        self.index, self.size = self.accelerator.process_index, self.accelerator.num_processes
        self.device = device
        kind = self.accelerator.distributed_type.name
        # accelerate shards on accelerators alone; its switch is honoured on CPU ranks as well, which is what tests run on.
        self.sharded = self.size > 1 and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
        if self.sharded and os.environ.get("FSDP_VERSION", "1") != "2":
            raise UserError("accelerate config: FSDP version 1 is not supported; choose fsdp_version: 2")
        if kind not in PLAIN and not (self.sharded and kind == "FSDP"):
            raise UserError(f"accelerate config: {kind} is not supported; choose MULTI_GPU, or FSDP with version 2")

    @property
    def main(self) -> bool:
        return self.index == 0

    def wrap(self, module: nn.Module) -> nn.Module:
        """`module` for training: as it is on one rank, else replicated or sharded (its parameters are then DTensors)."""
        if self.size == 1:
            return module
        if self.sharded:
            from torch.distributed.fsdp import fully_shard

            fully_shard(module)
            return module
        return self.accelerator.prepare_model(module)

    def unsynchronised(self, module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Around a micro-batch: gradients are summed over the ranks in the `last` one of a step alone."""
        if self.size == 1:
            return nullcontext()
        if self.sharded:
            module.set_requires_gradient_sync(last)  # type: ignore[operator]
            return nullcontext()
        return nullcontext() if last else self.accelerator.no_sync(module)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element by element over all ranks, in float64."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(tensor)
        return tensor.tolist()

    def agree(self, value: Any) -> Any:
        """The main rank's value, on every rank."""
        if self.size == 1:
            return value
        return broadcast_object_list([value])[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of the ranks, on each of them."""
        return [value] if self.size == 1 else gather_object([value])

    def wait(self) -> None:
        """Until every rank is here."""
        self.accelerator.wait_for_everyone()


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, gathered from all ranks where it is sharded. A collective: every rank must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def share(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's share of a full tensor that all ranks hold, sharded as `like` is; no communication."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def local(tensor: Tensor) -> Tensor:
    """The storage that this rank holds; writing to it writes to the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    """`module` with plain, full parameters inside the block, to be read and saved, not trained. A collective."""
    places: list[tuple[nn.Module, str, Any]] = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if isinstance(parameter, DTensor)
    ]
    full: dict[int, nn.Parameter] = {}
    for owner, name, parameter in places:
        if id(parameter) not in full:
            full[id(parameter)] = nn.Parameter(whole(parameter.data), requires_grad=False)
        owner._parameters[name] = full[id(parameter)]
    try:
        yield
    finally:
        for owner, name, parameter in places:
            owner._parameters[name] = parameter
