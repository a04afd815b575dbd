"""The EAGLE-3 head: its equations written out plainly, RoPE, save and load, the draft vocabulary."""

import json
from dataclasses import replace

import pytest
import torch
from kit import tiny_model, tiny_target, tiny_tokenizer
from safetensors.torch import load_file, save_file

from draftsmith.errors import UserError
from draftsmith.eval.drafters import cached_attention
from draftsmith.models.eagle import EagleHead, new_eagle_head
from draftsmith.models.kv import KVCache
from draftsmith.models.target import Target
from draftsmith.models.vocabulary import DraftVocabulary

TAPS = (0, 1, 2)


def tiny_head(target, vocabulary=None, **options):
    """A random head whose norms and weights are far from their start values, so that a missing one shows."""
    head = new_eagle_head(target, TAPS, vocabulary or DraftVocabulary.all_of(target.vocabulary), **options)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return head


def rms(x, gain, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gain


def rotate(x, positions, theta):
    """RoPE from its formula: pairs (i, i + d/2) turned by position · θ^(−2i/d). x: [n, heads, d]."""
    half = x.shape[-1] // 2
    angle = positions[:, None].double() * theta ** (-torch.arange(half).double() * 2 / x.shape[-1])
    cos, sin = angle.cos()[:, None].float(), angle.sin()[:, None].float()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def plain_layer(head, x, residual, positions, seen):
    """A layer written from the equations: attention reads `x`; `seen[i]` lists the keys that slot i may see. One row, one layer."""
    c, layer = head.config, head.layers[0]
    attention, theta = layer.self_attn, c.rope_parameters["rope_theta"]
    q = rotate((x @ attention.q_proj.weight.T).view(len(x), c.heads, c.head_dim), positions, theta)
    k = rotate((x @ attention.k_proj.weight.T).view(len(x), c.kv_heads, c.head_dim), positions, theta)
    v = (x @ attention.v_proj.weight.T).view(len(x), c.kv_heads, c.head_dim)
    outputs = []
    for i in range(len(x)):
        heads = []
        for h in range(c.heads):
            group = h // (c.heads // c.kv_heads)
            scores = torch.stack([q[i, h] @ k[j, group] / c.head_dim**0.5 for j in seen[i]]).softmax(0)
            heads.append(sum(w * v[j, group] for w, j in zip(scores, seen[i], strict=True)))
        outputs.append(torch.cat(heads))
    a = residual + torch.stack(outputs) @ attention.o_proj.weight.T
    m = rms(a, layer.post_attention_layernorm.weight, c.norm_eps)
    gate = m @ layer.mlp.gate_proj.weight.T
    return a + (gate * gate.sigmoid() * (m @ layer.mlp.up_proj.weight.T)) @ layer.mlp.down_proj.weight.T


def plain_step(head, tokens, state, positions, seen):
    """EAGLE-3: attention over [norm(embedding), norm(feature)], the un-normed feature is the residual."""
    layer, eps = head.layers[0], head.config.norm_eps
    e = rms(embedding_of(head)(tokens), layer.input_layernorm.weight, eps)
    return plain_layer(head, torch.cat([e, rms(state, layer.hidden_norm.weight, eps)], -1), state, positions, seen)


def embedding_of(head):
    return head._target[0].model.get_input_embeddings()


CAUSAL = [list(range(i + 1)) for i in range(5)]


def test_eagle_1_is_a_linear_fusion_and_a_layer_without_input_norm_read_by_the_targets_head():
    target = tiny_target("gemma2")  # whose output head scales and caps: EAGLE-1 must go through all of it
    full = DraftVocabulary.all_of(target.vocabulary)
    head = new_eagle_head(target, (), full, kind="eagle1", fc_bias=True)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    tokens, positions, last = torch.randint(6, 100, (1, 5)), torch.arange(5)[None], torch.randn(1, 5, target.width)
    visible = torch.ones(1, 5, 5, dtype=torch.bool).tril()
    state = head.step(tokens, head.fuse(last), positions, cached_attention(KVCache(1, 8, 1), visible, positions))
    x = torch.cat([embedding_of(head)(tokens[0]), last[0]], -1) @ head.fc.weight.T + head.fc.bias
    torch.testing.assert_close(state[0], plain_layer(head, x, x, positions[0], CAUSAL), atol=1e-4, rtol=1e-4)
    assert torch.equal(head.logits(state), target.head(state))
    assert not any("lm_head" in name or name == "norm.weight" for name in head.state_dict())


def test_eagle_3_1_norms_every_tap_before_fusion_and_feeds_the_normed_state_back():
    target = tiny_target()
    head = tiny_head(target, norm_taps=True, norm_state=True)
    taps, eps = torch.randn(1, 5, 3, target.width), head.config.norm_eps
    normed = torch.cat([rms(taps[0, :, i], head.fc_norm[i].weight, eps) for i in range(3)], -1)
    torch.testing.assert_close(head.fuse(taps)[0], normed @ head.fc.weight.T, atol=1e-4, rtol=1e-4)
    tokens, positions = torch.randint(6, 100, (1, 5)), torch.arange(5)[None]
    visible = torch.ones(1, 5, 5, dtype=torch.bool).tril()
    attend = cached_attention(KVCache(1, 8, 1), visible, positions)
    state = head.step(tokens, head.fuse(taps), positions, attend)
    before = plain_step(head, tokens[0], head.fuse(taps)[0], positions[0], CAUSAL)
    torch.testing.assert_close(state[0], rms(before, head.norm.weight, eps), atol=1e-4, rtol=1e-4)
    assert torch.equal(head.logits(state), head.lm_head(state))


def test_each_step_of_the_ablation_is_blind_to_what_it_leaves_out():
    target = tiny_target()
    full = DraftVocabulary.all_of(target.vocabulary)
    positions, visible = torch.arange(5)[None], torch.ones(1, 5, 5, dtype=torch.bool).tril()
    tokens, last = torch.randint(6, 100, (2, 1, 5)), torch.randn(2, 1, 5, target.width)

    def moves(inputs, tokens_a, tokens_b, last_a, last_b):
        head = new_eagle_head(target, (), full, kind="eagle1", inputs=inputs)
        a, b = (
            head.step(t, head.fuse(f), positions, cached_attention(KVCache(1, 8, 1), visible, positions))
            for t, f in ((tokens_a, last_a), (tokens_b, last_b))
        )
        return not torch.allclose(a, b)

    assert not moves("feature", tokens[0], tokens[1], last[0], last[0])
    assert moves("feature", tokens[0], tokens[0], last[0], last[1])
    assert not moves("token", tokens[0], tokens[0], last[0], last[1])
    assert moves("token", tokens[0], tokens[1], last[0], last[0])
    assert moves("shifted", tokens[0], tokens[1], last[0], last[0])
    assert moves("shifted", tokens[0], tokens[0], last[0], last[1])


def test_impossible_eagle_1_heads_are_refused():
    target = tiny_target()
    half = DraftVocabulary(torch.arange(0, target.vocabulary, 2), target.vocabulary)
    for vocabulary, options in ((half, {}), (DraftVocabulary.all_of(target.vocabulary), {"width": 16})):
        with pytest.raises(UserError, match="target's width and vocabulary"):
            new_eagle_head(target, (), vocabulary, kind="eagle1", **options)


@pytest.mark.parametrize("taps", [(2, 0), (1, 1)])
def test_taps_that_no_saved_head_could_be_loaded_with_are_refused(taps):
    target = tiny_target()
    with pytest.raises(UserError, match="do not rise"):
        new_eagle_head(target, taps, DraftVocabulary.all_of(target.vocabulary))


@pytest.mark.parametrize("kind", ["eagle1", "eagle3.1", "narrow"])
def test_every_switch_survives_save_and_load(tmp_path, kind):
    """FAULTS 45 and 49."""
    target = tiny_target()
    full = DraftVocabulary.all_of(target.vocabulary)
    taps, options = {
        "eagle1": ((), {"kind": "eagle1", "fc_bias": True, "inputs": "unshifted"}),
        "eagle3.1": (TAPS, {"norm_taps": True, "norm_state": True, "confidence": True}),
        "narrow": ((1,), {"width": 16, "layers": 2, "fc_bias": True}),
    }[kind]
    head = new_eagle_head(target, taps, full, **options)
    head.save(tmp_path)
    loaded = EagleHead.load(tmp_path, target)
    assert loaded.config == head.config
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in head.state_dict().items())


def test_a_narrower_head_starts_from_the_coordinates_of_the_targets_rows():
    target = tiny_target()
    full = DraftVocabulary.all_of(target.vocabulary)
    rows = target.model.lm_head.weight
    head = new_eagle_head(target, TAPS, full, width=16)
    best = torch.linalg.svd(rows, full_matrices=False).S[:16].pow(2).sum()
    torch.testing.assert_close(head.lm_head.weight.pow(2).sum(), best, rtol=1e-4, atol=0)


def test_confidence_gives_the_state_no_gradient():
    head = tiny_head(tiny_target(), confidence=True)
    state = torch.randn(4, head.config.width, requires_grad=True)
    head.confidence(state).sum().backward()
    assert state.grad is None
    assert head.confidence_head.weight.grad is not None
    with pytest.raises(UserError, match="no confidence"):
        tiny_head(tiny_target()).confidence(state)


def test_step_and_logits_equal_the_equations_written_out():
    target = tiny_target()
    head = tiny_head(target)
    tokens, positions = torch.randint(6, 100, (1, 5)), torch.tensor([[0, 1, 2, 3, 4]])
    taps = torch.randn(1, 5, 3, target.width)
    cache = KVCache(1, 8, 1)
    visible = torch.ones(1, 5, 5, dtype=torch.bool).tril()
    got = head.step(tokens, head.fuse(taps), positions, cached_attention(cache, visible, positions))
    fused = taps[0].flatten(1) @ head.fc.weight.T
    wanted = plain_step(head, tokens[0], fused, positions[0], CAUSAL)
    torch.testing.assert_close(got[0], wanted, atol=1e-4, rtol=1e-4)
    logits = rms(wanted, head.norm.weight, head.config.norm_eps) @ head.lm_head.weight.T
    torch.testing.assert_close(head.logits(got)[0], logits, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("positions", [list(range(8)), list(range(100, 108)), [3, 17, 4, 90]])
def test_rope_equals_its_formula_at_any_positions(positions):
    """FAULTS 22."""
    target = tiny_target()
    head = tiny_head(target)
    place = torch.tensor(positions)
    cos, sin = head.rotary(torch.zeros(1), place[None])
    angle = place[:, None] * 10000.0 ** (-torch.arange(4) * 2 / 8)
    torch.testing.assert_close(cos[0], angle.cos().repeat(1, 2), atol=1e-5, rtol=0)
    torch.testing.assert_close(sin[0], angle.sin().repeat(1, 2), atol=1e-5, rtol=0)


def test_rope_settings_are_the_targets_and_survive_save_and_load(tmp_path):
    """FAULTS 24."""
    scaling = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}
    target = tiny_target(rope_parameters=scaling)
    head = tiny_head(target)
    head.save(tmp_path)
    place = torch.tensor([[0, 5, 40]])
    ours = head.rotary(torch.zeros(1), place)
    for other in (target.model.model.rotary_emb, EagleHead.load(tmp_path, target).rotary):
        torch.testing.assert_close(ours, other(torch.zeros(1), place))


@pytest.mark.parametrize("size", [None, 60])
def test_save_and_load_is_bit_equal_and_holds_nothing_of_the_targets(tmp_path, size):
    target = tiny_target()
    vocabulary = None if size is None else DraftVocabulary(torch.arange(3, 3 + size), target.vocabulary)
    head = tiny_head(target, vocabulary)
    head.save(tmp_path)
    loaded = EagleHead.load(tmp_path, target)
    assert loaded.config == head.config
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    assert torch.equal(loaded.vocabulary.target_ids, head.vocabulary.target_ids)
    assert not any("embed" in name for name in head.state_dict())


def test_each_missing_tensor_is_named(tmp_path):
    target = tiny_target()
    tiny_head(target).save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in set(tensors) - {"d2t", "t2d"}:
        save_file({k: v for k, v in tensors.items() if k != name}, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=name):
            EagleHead.load(tmp_path, target)


def test_features_of_another_width_or_number_are_refused():
    """FAULTS 46."""
    head = tiny_head(tiny_target())
    for shape in ((1, 4, 2, 32), (1, 4, 3, 16), (1, 4, 1, 96)):
        with pytest.raises(UserError, match="taps of width"):
            head.fuse(torch.zeros(shape))


@pytest.mark.parametrize("change", [{"heads": 3}, {"head_dim": 7}, {"width": 0}, {"layers": 0}, {"intermediate": 0}])
def test_impossible_sizes_are_refused_before_a_weight_is_made(change):
    """FAULTS 47."""
    with pytest.raises(UserError, match="impossible shape"):
        replace(tiny_head(tiny_target()).config, **change)


@pytest.mark.parametrize("flag", ["norm_joined", "norm_residual"])
def test_norms_of_other_projects_heads_stand_where_those_have_them(flag):
    """FAULTS 45: one norm over the concatenated taps; the normed feature as the residual."""
    target = tiny_target()
    head = tiny_head(target, **{flag: True})
    eps, taps = head.config.norm_eps, torch.randn(1, 5, 3, target.width)
    joined = taps[0].flatten(1)
    if flag == "norm_joined":
        joined = rms(joined, head.input_norm.weight, eps)
    g = head.fuse(taps)[0]
    torch.testing.assert_close(g, joined @ head.fc.weight.T, atol=1e-4, rtol=1e-4)
    tokens, positions = torch.randint(6, 100, (1, 5)), torch.arange(5)[None]
    visible = torch.ones(1, 5, 5, dtype=torch.bool).tril()
    state = head.step(tokens, g[None], positions, cached_attention(KVCache(1, 8, 1), visible, positions))
    layer, feature = head.layers[0], rms(g, head.layers[0].hidden_norm.weight, eps)
    e = rms(embedding_of(head)(tokens[0]), layer.input_layernorm.weight, eps)
    residual = feature if flag == "norm_residual" else g
    wanted = plain_layer(head, torch.cat([e, feature], -1), residual, positions[0], CAUSAL)
    torch.testing.assert_close(state[0], wanted, atol=1e-4, rtol=1e-4)


def test_the_output_head_starts_from_the_targets_rows():
    target = tiny_target()
    vocabulary = DraftVocabulary(torch.arange(0, target.vocabulary, 3), target.vocabulary)
    head = new_eagle_head(target, TAPS, vocabulary)
    assert torch.equal(head.lm_head.weight, target.model.lm_head.weight[vocabulary.target_ids])


def test_draft_vocabulary_maps_are_exact_and_fillers_are_valid():
    """FAULTS 37 and 39: fewer distinct tokens than slots; specials always in."""
    counts = torch.zeros(50, dtype=torch.long)
    counts[[7, 9, 40]] = torch.tensor([5, 9, 1])
    vocabulary = DraftVocabulary.most_frequent(counts, 10, {0, 49})
    ids = vocabulary.target_ids
    assert {0, 7, 9, 40, 49} <= set(ids.tolist())
    assert len(set(ids.tolist())) == 10
    assert torch.equal(torch.arange(10) + vocabulary.d2t, ids)
    assert bool(vocabulary.t2d[ids].all())
    assert int(vocabulary.t2d.sum()) == 10
    assert torch.equal(vocabulary.to_draft(ids), torch.arange(10))
    assert int(vocabulary.to_draft(torch.tensor(48))) == -1
    wide = vocabulary.widen(torch.ones(2, 10))
    assert wide.shape == (2, 50)
    assert torch.equal(wide[0].bool(), vocabulary.t2d)


def test_a_head_for_a_half_precision_target_keeps_exact_rope(tmp_path):
    """FAULTS 22 and 24: frequencies stay fp32, however the weights are stored."""
    tiny_head(tiny_target()).save(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"target_fingerprint": ""}))
    half = Target(tiny_model().to(torch.bfloat16), tiny_tokenizer())
    loaded = EagleHead.load(tmp_path, half)
    assert loaded.fc.weight.dtype == torch.bfloat16
    place = torch.tensor([[0, 7, 2000]])
    torch.testing.assert_close(
        loaded.rotary(torch.zeros(1), place), tiny_head(tiny_target()).rotary(torch.zeros(1), place)
    )


def test_a_head_of_another_target_of_the_same_sizes_is_refused(tmp_path):
    tiny_head(tiny_target()).save(tmp_path)
    with pytest.raises(UserError, match="made for target"):
        EagleHead.load(tmp_path, tiny_target(seed=1))


@pytest.mark.parametrize("damage", ["truncated weights", "no d2t", "not JSON", "unknown key", "nothing"])
def test_an_unreadable_head_is_one_line(tmp_path, damage):
    target = tiny_target()
    tiny_head(target).save(tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    if damage == "truncated weights":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "no d2t":
        save_file({k: v for k, v in load_file(weights).items() if k != "d2t"}, weights)
    elif damage == "not JSON":
        config.write_text("{")
    elif damage == "unknown key":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"shape": 3}))
    else:
        weights.unlink()
    with pytest.raises(UserError, match="not a readable head"):
        EagleHead.load(tmp_path, target)
