"""The optimiser of every trained model: Muon for hidden matrices, AdamW for the rest, and the learning-rate schedule.

Knows parameters and gradients; knows nothing of losses, data or checkpoints.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from draftsmith.train.ranks import local, share, whole

# Steps of this quintic bring the singular values of a matrix of norm 1 to about 1 (0.7 to 1.2), which is all that Muon
# needs (Jordan et al., https://kellerjordan.github.io/posts/muon/). Five steps lift all values above 0.003, three those
# above 0.02; the few below matter so little that at small batches the two steps saved buy more as further tokens.
NEWTON_SCHULZ, NEWTON_SCHULZ_STEPS = (3.4445, -4.7750, 2.0315), 3
HEADS = {"lm_head", "head"}  # modules that write the vocabulary; each of their rows is a token's own vector


def compute_dtype(device: torch.device | str) -> torch.dtype:
    """The dtype of matrix products on `device`: bf16 where the hardware multiplies it, else fp32.

    A CPU without such units emulates bf16 and is tens of times slower than in fp32.
    """
    kind = torch.device(device).type
    if kind == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    if kind != "cpu" or not hasattr(torch.cpu, "get_capabilities"):
        return torch.float32
    capabilities = torch.cpu.get_capabilities()
    return torch.bfloat16 if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") else torch.float32


def schedule(step: int, steps: int, warmup: int) -> float:
    """Factor of the learning rate at `step` (from 0): a linear rise over `warmup` steps, then a linear fall to `steps`.

    Never 0 within the run: the first step uses 1/warmup, the last 1/(steps - warmup) of the rate.
    """
    if step < warmup:
        return (step + 1) / warmup
    return max(0.0, (steps - step) / max(1, steps - warmup))


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Give every group `factor` times its own initial rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


def orthogonalize(matrices: Tensor, steps: int = NEWTON_SCHULZ_STEPS) -> Tensor:
    """The nearest semi-orthogonal matrices, roughly, by Newton-Schulz iteration. `matrices`: [n, rows, columns].

    Computed in `compute_dtype`, which is where `torch.optim.Muon` differs: it always multiplies in bf16 and one matrix
    at a time, which on a CPU without bf16 units takes 25 times as long and more than the whole forward and backward.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrices.to(compute_dtype(matrices.device))
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


class MuonAdamW(torch.optim.Optimizer):
    """One optimiser with two rules, by a group's `rule`: "muon" (2-D parameters only) or "adamw".

    Muon: m ← μ m + (1 - μ) g;  θ ← θ - lr √max(1, rows/columns) · orthogonalize(g + μ (m - g))  (Nesterov, μ = 0.95).
    """

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        defaults = {
            "rule": "adamw",
            "lr": 1e-3,
            "weight_decay": 0.0,
            "momentum": 0.95,
            "betas": (0.9, 0.95),
            "eps": 1e-8,
        }
        super().__init__(groups, defaults)
        for group in self.param_groups:
            group.setdefault("initial_lr", group["lr"])
            if group["rule"] == "muon" and any(parameter.ndim != 2 for parameter in group["params"]):
                raise ValueError("Muon takes matrices only")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update from the gradients at hand; a parameter without a gradient is left alone."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["rule"] == "muon":
                self._muon(parameters, group)
            elif parameters:
                self._adamw(parameters, group)
        return loss

    def _muon(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        by_shape: dict[tuple[torch.Size, torch.device], list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            by_shape[parameter.shape, parameter.device].append(parameter)
        momentum = group["momentum"]
        for (shape, _), alike in by_shape.items():
            directions = []
            for parameter in alike:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                gradient = parameter.grad
                assert gradient is not None
                state["momentum"].lerp_(gradient, 1 - momentum)
                # The iteration multiplies whole matrices: sharded ones are gathered, and every rank keeps its own rows.
                directions.append(whole(gradient.lerp(state["momentum"], momentum)))
            rate = group["lr"] * math.sqrt(max(1.0, shape[0] / shape[1]))
            for parameter, update in zip(alike, orthogonalize(torch.stack(directions)), strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(share(update, parameter), alpha=-rate)

    def _adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["mean"] = torch.zeros_like(parameter)
                state["square"] = torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            [local(parameter) for parameter in parameters],
            [local(parameter.grad) for parameter in parameters if parameter.grad is not None],
            [local(state["mean"]) for state in states],
            [local(state["square"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def make_optimizer(
    module: nn.Module,
    matrix_lr: float,
    other_lr: float,
    weight_decay: float = 0.0,
    embedding_lr: float | None = None,
) -> MuonAdamW:
    """Muon at `matrix_lr` for the trainable hidden matrices of `module`, AdamW(0.9, 0.95) for heads, norms, biases
    (`other_lr`) and embeddings (`embedding_lr`, default `other_lr`).

    Embeddings are told by their module type, heads by a name in `HEADS`; a head tied to the embedding counts as
    embedding. Their rows are one token's vector each and see sparse gradients, for which Muon's common step is wrong.
    `weight_decay` shrinks matrices, heads and embeddings, never norms and biases.
    """
    embedded = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Embedding)}
    kinds: dict[str, list[Tensor]] = {"matrices": [], "heads": [], "embeddings": [], "vectors": []}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in embedded:
            kinds["embeddings"].append(parameter)
        elif parameter.ndim != 2 or min(parameter.shape) == 1:
            kinds["vectors"].append(parameter)
        elif HEADS & set(name.split(".")):
            kinds["heads"].append(parameter)
        else:
            kinds["matrices"].append(parameter)
    rates = {"matrices": matrix_lr, "embeddings": other_lr if embedding_lr is None else embedding_lr}
    groups = [
        {
            "params": parameters,
            "name": kind,
            "rule": "muon" if kind == "matrices" else "adamw",
            "lr": rates.get(kind, other_lr),
            "weight_decay": 0.0 if kind == "vectors" else weight_decay,
        }
        for kind, parameters in kinds.items()
        if parameters
    ]
    if not groups:
        raise ValueError("nothing to train: no parameter requires a gradient")
    return MuonAdamW(groups)


def training_bytes(module: nn.Module) -> int:
    """Bytes to train `module`, activations aside: fp32 masters and gradients, and one moment under Muon, two under AdamW."""
    per_number = {"muon": 12, "adamw": 16}
    groups = make_optimizer(module, 0.0, 0.0).param_groups
    return sum(per_number[group["rule"]] * p.numel() for group in groups for p in group["params"])
