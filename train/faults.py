"""What is wrong with a step that is not finite, in the user's words: which tensor of which row, or which weight.

Knows batches and objectives. Does not stop anything: the loop does.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from draftsmith.data.batches import Batch
from draftsmith.train.checkpoint import trained
from draftsmith.train.objectives import Objective
from draftsmith.train.ranks import local


def nonfinite(objective: Objective, batches: Sequence[Batch], rows: Sequence[Sequence[int]]) -> str:
    """The first that is not finite of: a tensor of a row, a weight, a row's own loss. "" where all of this rank's are.

    `rows`: the row numbers of each batch.
    """
    for batch, numbers in zip(batches, rows, strict=True):
        for name, tensor in _tensors(batch):
            bad = _bad(tensor).flatten(1).any(1)
            if bad.any():
                return (
                    f"{name} of row {numbers[int(bad.nonzero()[0])]} hold numbers that are not finite; "
                    "delete the cache's folder to make it again"
                )
    for name, parameter in trained(objective).items():
        if _bad(local(parameter.detach())).any():
            return f"weight {name} is not finite; lower matrix_lr and other_lr"
    return _row(objective, batches, rows)


def nonfinite_gradients(module: nn.Module) -> str:
    """The first weight whose gradient is not finite, "" where all of this rank's are."""
    for name, parameter in trained(module).items():
        if parameter.grad is not None and _bad(local(parameter.grad)).any():
            return f"the gradient of {name} is not finite; lower matrix_lr and other_lr"
    return ""


def _tensors(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    """The floating fields of a batch, [B, ...] each, by the names that the cache gives them."""
    for name in ("taps", "last", "weights"):
        if (tensor := getattr(batch, name)) is not None:
            yield name, tensor
    if batch.teacher is not None:
        for name, tensor in batch.teacher._asdict().items():
            if tensor.is_floating_point():
                yield f"the teacher's {name}", tensor


def _bad(tensor: Tensor) -> Tensor:
    return ~torch.isfinite(tensor)


@torch.no_grad()
def _row(objective: Objective, batches: Sequence[Batch], rows: Sequence[Sequence[int]]) -> str:
    for batch, numbers in zip(batches, rows, strict=True):
        for place, number in enumerate(numbers):
            if not torch.isfinite(objective(only(batch, place)).loss):
                return f"the loss of row {number}; lower matrix_lr and other_lr"
    return ""


def only(batch: Batch, place: int) -> Batch:
    """One row of a batch, with the padding of all."""
    one = slice(place, place + 1)

    def cut(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[one]

    teacher = batch.teacher
    return Batch(
        batch.token_ids[one],
        batch.supervised[one],
        batch.lengths[one],
        cut(batch.taps),
        cut(batch.last),
        None if teacher is None else type(teacher)(*(tensor[one] for tensor in teacher)),
        cut(batch.weights),
    )
