"""EAGLE-3's training written plainly from the paper's equations, slot by slot and step by step, against the fast path.

Nothing of the fast path is used here but its weights: no batch, no mask, no fused head.
"""

import pytest
import torch
from kit import TAPS, a_batch, tiny_target

from draftsmith.models.eagle import EagleHead, new_eagle_head
from draftsmith.models.vocabulary import DraftVocabulary
from draftsmith.train.objectives import EagleObjective

EPS = 1e-6


def norm(x, gain):
    return x / (x.pow(2).mean() + EPS).sqrt() * gain


def turned(x, position, theta=10000.0):
    """RoPE of one head's vector [d] at a position (Su et al. 2021), the halves paired as Llama does."""
    d = len(x)
    angle = position * theta ** (-torch.arange(0, d, 2) / d)
    a, b = x[: d // 2], x[d // 2 :]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])


def heads_of(matrix, x, count, position=None):
    """matrix · x as `count` head vectors, turned to a position if one is given."""
    split = (matrix @ x).split(len(matrix) // count)
    return list(split) if position is None else [turned(part, position) for part in split]


def reference(head: EagleHead, target, tokens, taps, steps):
    """Draft logits [steps][slots] of one row: tokens [T], taps [T, A, W]. The paper's section 3, its published code's layer."""
    layer, config = head.layers[0], head.config
    attention, mlp = layer.self_attn, layer.mlp
    embed = target.model.get_input_embeddings().weight
    last = len(tokens) - 1
    state = {t: head.fc.weight @ taps[t].flatten() for t in range(len(tokens))}  # g_t
    keys, values = [], []  # [step][slot][kv head]
    logits = []
    for k in range(steps):
        slots = [t for t in range(len(tokens)) if t + 1 + k <= last]  # the others would read past the row
        joined = {
            t: torch.cat(
                [
                    norm(embed[tokens[t + 1 + k]], layer.input_layernorm.weight),
                    norm(state[t], layer.hidden_norm.weight),
                ]
            )
            for t in slots
        }
        keys.append({t: heads_of(attention.k_proj.weight, joined[t], config.kv_heads, t + k) for t in slots})
        values.append({t: heads_of(attention.v_proj.weight, joined[t], config.kv_heads) for t in slots})
        following, row = {}, {}
        for t in slots:
            seen = [(0, s) for s in range(t + 1)] + [(j, t) for j in range(1, k + 1)]
            heads = []
            for h, query in enumerate(heads_of(attention.q_proj.weight, joined[t], config.heads, t + k)):
                kv = h * config.kv_heads // config.heads
                scores = torch.stack([query @ keys[j][s][kv] / config.head_dim**0.5 for j, s in seen])
                heads.append(sum(w * values[j][s][kv] for w, (j, s) in zip(scores.softmax(0), seen, strict=True)))
            x = state[t] + attention.o_proj.weight @ torch.cat(heads)
            n = norm(x, layer.post_attention_layernorm.weight)
            gate = mlp.gate_proj.weight @ n
            following[t] = x + mlp.down_proj.weight @ (gate * gate.sigmoid() * (mlp.up_proj.weight @ n))
            row[t] = head.lm_head.weight @ norm(following[t], head.norm.weight)
        state = following
        logits.append(row)
    return logits


@pytest.mark.parametrize(("kv_heads", "decay"), [(4, 1.0), (2, 0.8), (1, 0.5)])
def test_loss_acceptance_and_gradients_equal_the_papers_equations_at_every_position(kv_heads, decay):
    """KL(p_{t+1+k} ‖ q) over slots t and steps k whose token x_{t+2+k} is supervised; p's mass outside V_d stays outside."""
    steps = 4
    target = tiny_target()
    ids = torch.randperm(target.vocabulary, generator=torch.Generator().manual_seed(2))[:60].sort().values
    head = new_eagle_head(target, TAPS, DraftVocabulary(ids, target.vocabulary), kv_heads=kv_heads)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    batch = a_batch(target, [12, 9], k=target.vocabulary)

    loss, accepted, sure = torch.zeros(()), [0.0] * steps, torch.zeros(steps)
    for row, length in enumerate(batch.lengths.tolist()):
        tokens = batch.token_ids[row, :length].tolist()
        p_of = target.forward(batch.token_ids[row : row + 1, :length]).logits[0].softmax(-1).detach()
        for k, by_slot in enumerate(reference(head, target, tokens, batch.taps[row, :length], steps)):
            for t, z in by_slot.items():
                if t + 2 + k < length and batch.supervised[row, t + 2 + k]:
                    p, log_q = p_of[t + 1 + k][ids], z.log_softmax(-1)
                    loss = loss + decay**k * (p * (p.log() - log_q)).sum()
                    accepted[k] += torch.minimum(p, log_q.exp()).sum().item()
                    sure[k] += 1
    loss.backward()
    wanted = {name: parameter.grad.clone() for name, parameter in head.named_parameters()}

    head.zero_grad()
    sums = EagleObjective(head, steps, decay)(batch)
    sums.loss.backward()
    torch.testing.assert_close(sums.loss, loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums.accepted, torch.tensor(accepted), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sums.count, sure)
    for name, parameter in head.named_parameters():
        scale = float(wanted[name].abs().max())
        assert scale > 0, name
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-3, atol=1e-4 * scale, msg=name)
