"""The heavy twin: the same function as a target, at the cost of a much larger one.

Blocks are added whose output projections are zero, so that they compute everything and change nothing. Acceptance stays what it is
for the real target, while a forward costs what a model ten to twenty times larger would cost: speed-ups measured on it are real.
"""

import torch
from transformers import AutoModelForCausalLM

from draftsmith.models.target import Target


def heavy_twin(target: Target, times: float = 12.0) -> Target:
    """A twin whose forward has about `times` the target's multiplications. Llama-like targets only; taps keep their numbers."""
    source = target.model.state_dict()
    block = sum(p.numel() for p in target.model.model.layers[0].parameters())
    total = block * target.blocks + target.model.lm_head.weight.numel()
    extra = round((times - 1) * total / block)
    config = type(target.config).from_dict({**target.config.to_dict(), "num_hidden_layers": target.blocks + extra})
    twin = AutoModelForCausalLM.from_config(config).to(target.dtype)
    twin.load_state_dict(source, strict=False)
    with torch.no_grad():
        for layer in twin.model.layers[target.blocks :]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    twin.generation_config = target.model.generation_config
    return Target(twin, target.tokenizer, target.path)
