"""Train one EAGLE-3 head with SpecForge: its model, strategy, loss and optimiser with the defaults of its training config.

Runs in SpecForge's own environment. Other than by default: SDPA attention and the formula of its Triton loss in plain PyTorch,
since FlexAttention and Triton need a GPU; float32; the draft vocabulary and attention heads of our head; the steps that the states
name, each of them one right-padded batch.
"""

import os
import sys
import types

os.environ |= {"TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
import torch
from recipe import Clock, States, arguments, finish, write_probe
from safetensors.torch import load_file
from transformers import AutoConfig, LlamaConfig


class PlainLoss:
    """−mean over all slots, masked ones included, of mask · Σ_v p log q: what SpecForge's kernel computes."""

    @staticmethod
    def apply(logits: torch.Tensor, target: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return -(mask * target * logits.float().log_softmax(-1)).sum(-1).mean()


stand_in = types.ModuleType("specforge.core.loss")
stand_in.LogSoftmaxLoss = PlainLoss
sys.modules["specforge.core.loss"] = stand_in
from specforge.algorithms.eagle3.model import OnlineEagle3Model  # noqa: E402
from specforge.config.schema import TrainingConfig  # noqa: E402
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3  # noqa: E402
from specforge.modeling.target.target_head import TargetHead  # noqa: E402
from specforge.optimizer import BF16Optimizer  # noqa: E402
from specforge.runtime.contracts import TrainBatch  # noqa: E402
from specforge.training.strategies.base import Eagle3TrainStrategy  # noqa: E402

SHAPE = ("vocab_size", "hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings", "rms_norm_eps")
SHAPE += ("pad_token_id", "bos_token_id", "eos_token_id", "rope_parameters", "initializer_range")


def new_draft(states: States) -> LlamaForCausalLMEagle3:
    source = AutoConfig.from_pretrained(states.about["target"])
    config = LlamaConfig(
        **{name: getattr(source, name) for name in SHAPE},
        architectures=["LlamaForCausalLMEagle3"],
        num_hidden_layers=1,
        num_key_value_heads=states.about["kv_heads"],
        intermediate_size=states.about["intermediate"],
        tie_word_embeddings=False,
    )
    config.draft_vocab_size = states.about["draft_vocabulary"]
    # Its export writes none, and readers would take the default of deep targets; nested ids count outputs of layers.
    config.eagle_config = {"eagle_aux_hidden_state_layer_ids": states.about["taps"], "use_aux_hidden_state": True}
    draft = LlamaForCausalLMEagle3(config, attention_backend="sdpa")
    draft.t2d.copy_(states.vocabulary["t2d"])
    draft.d2t.copy_(states.vocabulary["d2t"])
    draft.load_embedding(states.about["target"])
    draft.freeze_embedding()
    return draft


def target_head(states: States) -> TargetHead:
    """Its frozen target head, in float32; its own loader takes only checkpoints with an index file, and makes them bf16."""
    head = TargetHead(states.about["target"])
    weights = load_file(os.path.join(states.about["target"], "model.safetensors"))
    with torch.no_grad():
        head.fc.weight.copy_(weights["lm_head.weight"])
    head.freeze_weights()
    return head.eval()


def batch(states: States, rows: list[int]) -> TrainBatch:
    found = [states.row(row) for row in rows]

    def padded(name: str) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([row[name] for row in found], batch_first=True)

    lengths = torch.tensor([len(row["token_ids"]) for row in found])
    tensors = {
        "input_ids": padded("token_ids"),
        "attention_mask": (torch.arange(int(lengths.max())) < lengths[:, None]).long(),
        "loss_mask": padded("supervised").long(),
        "hidden_state": padded("taps"),
        "target": padded("last"),
    }
    return TrainBatch([str(row) for row in rows], "eagle3", tensors, {"target_repr": "hidden_state"})


def main() -> None:
    given = arguments(__doc__)
    torch.set_num_threads(1)
    torch.manual_seed(given.seed)
    states = States.read(given.states)
    draft, steps = new_draft(states), states.steps(given.seed)
    fields = TrainingConfig.model_fields
    names = ("learning_rate", "lr_scheduler", "warmup_ratio", "max_grad_norm", "ttt_length", "lk_loss_type")
    settings = {name: fields[name].default for name in names}
    if given.rate is not None:
        settings["learning_rate"] = given.rate
    strategy = Eagle3TrainStrategy(
        OnlineEagle3Model(draft, length=settings["ttt_length"], attention_backend="sdpa"),
        target_head=target_head(states),
    )
    optimizer = BF16Optimizer(
        draft,
        settings["learning_rate"],
        max_grad_norm=settings["max_grad_norm"],
        total_steps=len(steps),
        warmup_ratio=settings["warmup_ratio"],
        lr_scheduler=settings["lr_scheduler"],
    )
    draft.train()
    losses: list[float] = []
    clock = Clock()
    for rows in clock.each(steps):
        loss = strategy.forward_loss(batch(states, rows)).loss
        loss.backward()
        optimizer.step()
        losses.append(round(loss.item(), 4))
    draft.eval()
    draft.save_pretrained(given.out / "head")
    first = steps[0][0]
    write_probe(given.out, draft.lm_head, first, lambda: strategy.forward_loss(batch(states, [first])))
    decay = strategy.ploss_decay
    finish(given.out, "specforge", draft, clock, losses, **settings, optimizer="adamw", decay=decay)


if __name__ == "__main__":
    main()
