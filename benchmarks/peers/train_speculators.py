"""Train one EAGLE-3 head with speculators: its model, loss, optimiser and schedule with the defaults of its `train` command.

Runs in speculators' own environment. Other than by default: SDPA attention and plain losses, since FlexAttention and Triton need a
GPU; float32, in Muon too; the layer ids, draft vocabulary and attention heads of our head; the steps that the states name.
"""

import argparse
import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""
import torch
from recipe import Clock, States, arguments, finish, write_probe
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.cli import create_transformer_layer_config
from speculators.train.config import TrainConfig
from speculators.train.data import CollateFn
from speculators.train.optimizers import build_optimizers
from speculators.train.trainer import TrainerConfig, _resolve_scheduler_steps
from torch.optim import _muon
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

PASSED_ON = ("optimizer", "lr", "weight_decay", "muon_lr", "muon_momentum", "muon_weight_decay", "muon_ns_steps")
PASSED_ON += ("muon_adjust_lr_fn", "scheduler_type", "scheduler_warmup_steps", "scheduler_warmup_ratio")
PASSED_ON += ("scheduler_num_cosine_cycles",)
TOLD = (
    "ttt_steps",
    "ttt_step_loss_decay",
    "loss_fn",
    "norm_before_residual",
    "norm_before_fc",
    "norm_output",
    "draft_arch",
)


def orthogonal(update: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> torch.Tensor:
    """PyTorch's Newton–Schulz iteration of Muon, in float32: in bf16, which a CPU emulates, it takes six times all else."""
    a, b, c = coefficients
    wide = update.float() if update.shape[0] <= update.shape[1] else update.float().T
    wide = wide / wide.norm().clamp(min=eps)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide if update.shape[0] <= update.shape[1] else wide.T


def defaults(states: States, rate: float | None) -> argparse.Namespace:
    """The package's own defaults, resolved by itself, with what the module's docstring names."""
    given = {
        "speculator_type": "eagle3",
        "verifier_name_or_path": states.about["target"],
        "draft_vocab_size": states.about["draft_vocabulary"],
        "target_layer_ids": [tap + 1 for tap in states.about["taps"]],  # it counts a layer by its input
        "draft_attn_impl": "sdpa",
        "loss_implementation": "eager",
        "hidden_states_dtype": "float32",
    }
    return argparse.Namespace(**TrainConfig.from_flat(given | ({} if rate is None else {"lr": rate})).flatten())


def new_model(states: States, args: argparse.Namespace) -> Eagle3DraftModel:
    layer = create_transformer_layer_config(
        args.verifier_name_or_path,
        args.num_layers,
        args.draft_arch,
        args.draft_hidden_act,
        args.sliding_window,
        args.full_attention_indices,
    )
    layer.num_key_value_heads = states.about["kv_heads"]
    layer.intermediate_size = states.about["intermediate"]
    maps = {name: states.vocabulary[name] for name in ("t2d", "d2t")}
    return Eagle3DraftModel.from_training_args(layer, **maps, **vars(args))


def batch(states: States, rows: list[int]) -> dict[str, torch.Tensor]:
    """The rows as its own collation packs them into one, each a document."""
    samples = []
    for row in map(states.row, rows):
        length = len(row["token_ids"])
        samples.append(
            {
                "hidden_states": row["taps"],
                "input_ids": row["token_ids"],
                "verifier_last_hidden_states": row["before_norm"],
                "loss_mask": row["supervised"],
                "lengths": torch.tensor([length]),
                "position_ids": torch.arange(length),
            }
        )
    total = sum(len(sample["input_ids"]) - 1 for sample in samples)
    width = samples[0]["verifier_last_hidden_states"].shape[1]
    taps = samples[0]["hidden_states"].shape[1] // width
    packed = CollateFn(total, width, taps, torch.float32, shift_batch)(samples)
    return {name: value for name, value in packed.items() if isinstance(value, torch.Tensor)}


def main() -> None:
    given = arguments(__doc__)
    torch.set_num_threads(1)
    torch.manual_seed(given.seed)
    states = States.read(given.states)
    args = defaults(states, given.rate)
    model, steps = new_model(states, args), states.steps(given.seed)
    call, _ = Eagle3DraftModel.get_trainer_kwargs(**vars(args))
    passed = {name: getattr(args, name) for name in PASSED_ON}
    config = TrainerConfig(num_epochs=1, save_path="", max_steps=len(steps), **passed)
    _muon._zeropower_via_newtonschulz = orthogonal
    optimizers = build_optimizers(model, config)
    warmup, total = _resolve_scheduler_steps(config, len(steps))
    if config.scheduler_type == "linear":
        schedulers = [get_linear_schedule_with_warmup(o, warmup, total) for o in optimizers]
    else:
        cycles = config.scheduler_num_cosine_cycles
        schedulers = [get_cosine_schedule_with_warmup(o, warmup, total, num_cycles=cycles) for o in optimizers]
    model.train()
    losses: list[float] = []
    clock = Clock()
    for rows in clock.each(steps):  # as its Trainer.train_epoch steps
        _, loss, _ = model(**batch(states, rows), **call)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepped in (*optimizers, *schedulers):
            stepped.step()
        losses.append(round(loss.item(), 4))
    model.eval()
    model.save_pretrained(given.out / "head")
    first = steps[0][0]
    write_probe(given.out, model.lm_head, first, lambda: model(**batch(states, [first]), **call))
    told = {name: getattr(args, name) for name in TOLD}
    finish(given.out, "speculators", model, clock, losses, **told, **passed, clip=1.0, warmup=warmup)


if __name__ == "__main__":
    main()
