"""EAGLE heads as the engines compute them, written from their descriptions alone: reads an exported folder and nothing of ours.

One row; attention by its formula; features of the target as `transformers` hands them out (`output_hidden_states`). `engine`
chooses where the ids of the fused states are read and what they mean, as that engine does.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

IDS = "eagle_aux_hidden_state_layer_ids"


def rms(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gain


def inverse_frequencies(config: dict[str, Any], old_keys: bool) -> Tensor:
    """Of plain, linear and llama3 RoPE, from the old keys or the new one."""
    scaling = config["rope_scaling"] if old_keys else config["rope_parameters"]
    theta = config["rope_theta"] if old_keys else config["rope_parameters"]["rope_theta"]
    kind = (scaling or {}).get("rope_type", "default")
    inverse = theta ** (-torch.arange(0, config["head_dim"], 2).double() / config["head_dim"])
    if kind == "linear":
        return inverse / scaling["factor"]
    if kind == "llama3":
        length = 2 * math.pi / inverse
        low, high = (
            scaling["original_max_position_embeddings"] / scaling[f"{end}_freq_factor"] for end in ("low", "high")
        )
        part = (scaling["original_max_position_embeddings"] / length - scaling["low_freq_factor"]) / (
            scaling["high_freq_factor"] - scaling["low_freq_factor"]
        )
        smooth = (1 - part) * inverse / scaling["factor"] + part * inverse
        return torch.where(length < high, inverse, torch.where(length > low, inverse / scaling["factor"], smooth))
    assert kind == "default"
    return inverse


class PlainHead:
    """A folder's head. `target` is a `transformers` model, asked for its hidden states, embedding and output head alone."""

    def __init__(self, folder: Path, engine: str, target: Any) -> None:
        self.engine, self.target = engine, target
        self.top = json.loads((folder / "config.json").read_text())
        self.config = self.top.get("transformer_layer_config", self.top)
        self.weights = {
            name.replace("midlayer.", "layers.0."): value
            for name, value in load_file(folder / "model.safetensors").items()
        }
        self.eagle1 = "norm.weight" not in self.weights
        self.inverse = inverse_frequencies(self.config, old_keys=engine in ("sglang", "trtllm"))
        layers = target.config.num_hidden_layers
        if engine == "trtllm":
            settings = yaml.safe_load((folder / "speculative.yaml").read_text())["speculative_config"]
            self.ids = [i + 1 for i in settings["eagle3_layers_to_capture"]]
        elif engine == "sglang" and not self.eagle1:
            self.ids = [i + 1 for i in self.top["eagle_config"][IDS]]
        else:
            self.ids = self.top.get(IDS, [])
        assert all(0 < i < layers for i in self.ids)

    def w(self, name: str) -> Tensor:
        return self.weights[name].float()

    def features(self, ids: Tensor) -> Tensor:
        """ids [n] → g [n, H]."""
        states = self.target(ids[None], output_hidden_states=True).hidden_states
        if self.eagle1:
            return states[-1][0]
        eps, taps = self.config["rms_norm_eps"], [states[i][0] for i in sorted(self.ids)]
        if self.top["norm_before_fc"]:
            taps = list(rms(torch.cat(taps, -1), self.w("input_norm.weight"), eps).chunk(len(taps), -1))
        if self.top["fc_norm"]:
            taps = [rms(tap, self.w(f"fc_norm.{i}.weight"), eps) for i, tap in enumerate(taps)]
        return torch.cat(taps, -1) @ self.w("fc.weight").T

    def attention(self, layer: str, x: Tensor) -> Tensor:
        c, n = self.config, len(x)
        heads, groups, size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        q, k, v = (
            (x @ self.w(f"{layer}.self_attn.{part}_proj.weight").T).view(n, count, size)
            for part, count in (("q", heads), ("k", groups), ("v", groups))
        )
        angle = torch.arange(n).double()[:, None] * self.inverse
        cos, sin = angle.cos()[:, None].float(), angle.sin()[:, None].float()

        def turn(y: Tensor) -> Tensor:
            a, b = y.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        q, k = turn(q), turn(k)
        k, v = k.repeat_interleave(heads // groups, 1), v.repeat_interleave(heads // groups, 1)
        scores = torch.einsum("ihd,jhd->hij", q, k) / size**0.5
        weights = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf")).softmax(-1)
        out = torch.einsum("hij,jhd->ihd", weights, v)
        return out.reshape(n, -1) @ self.w(f"{layer}.self_attn.o_proj.weight").T

    def states(self, tokens: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Joined tokens [n] and features [n, H] → (what the output head reads, what the next step is fed)."""
        eps, embedding = self.config["rms_norm_eps"], self.target.get_input_embeddings().weight[tokens]
        x = g
        if self.eagle1:
            x = torch.cat([embedding, g], -1) @ self.w("fc.weight").T
            x = x + self.w("fc.bias") if self.engine == "sglang" else x
        for i in range(self.config["num_hidden_layers"]):
            layer, inputs = f"layers.{i}", x
            if i == 0 and not self.eagle1:
                normed = rms(x, self.w(f"{layer}.hidden_norm.weight"), eps)
                inputs = torch.cat([rms(embedding, self.w(f"{layer}.input_layernorm.weight"), eps), normed], -1)
                x = normed if self.top["norm_before_residual"] and self.engine in ("vllm", "speculators") else x
            elif i > 0:
                own = self.engine in ("vllm", "speculators") or self.eagle1
                name = f"{layer}.input_layernorm.weight" if own else f"{layer}.hidden_norm.weight"
                inputs = rms(x, self.w(name), eps)
            x = x + self.attention(layer, inputs)
            m = rms(x, self.w(f"{layer}.post_attention_layernorm.weight"), eps)
            gate = m @ self.w(f"{layer}.mlp.gate_proj.weight").T
            x = (
                x
                + (gate * gate.sigmoid() * (m @ self.w(f"{layer}.mlp.up_proj.weight").T))
                @ self.w(f"{layer}.mlp.down_proj.weight").T
            )
        if self.eagle1:
            return x, x
        normed = rms(x, self.w("norm.weight"), eps)
        return normed, normed if self.top["norm_output"] else x

    def logits(self, read: Tensor) -> Tensor:
        """[n, H] → [n, V], −inf for target ids that the draft lacks."""
        if self.eagle1:
            return read @ self.target.get_output_embeddings().weight.T
        found = read @ self.w("lm_head.weight").T
        if "d2t" not in self.weights:
            return found
        wide = torch.full((len(found), self.config["vocab_size"]), float("-inf"))
        wide[:, torch.arange(found.shape[1]) + self.weights["d2t"]] = found
        return wide

    @torch.no_grad()
    def chain(self, ids: Tensor, drafted: Tensor) -> Tensor:
        """A text [n + 1] and tokens that were drafted after it [K − 1] → logits [K, V] of the K drafted positions."""
        g, tokens, found = self.features(ids[:-1]), ids[1:], []
        for step in range(len(drafted) + 1):
            read, fed = self.states(tokens, g)
            found.append(self.logits(read[-1:])[0])
            if step < len(drafted):
                tokens, g = torch.cat([tokens, drafted[step : step + 1]]), torch.cat([g, fed[-1:]])
        return torch.stack(found)
