"""Rollouts: the same numbers as decoding at every depth, no look into the future, no effect of padding or neighbours."""

import pytest
import torch
from kit import STEPS, TAPS, a_batch, a_head, objectives, tiny_target

from draftsmith.data.batches import Batch, TopK
from draftsmith.eval.drafters import Committed, EagleDrafter, LMDrafter
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.tree import chain_shape
from draftsmith.models.draft import DraftLM
from draftsmith.train.losses import plain
from draftsmith.train.rollout import RolloutAttention, causal_block, flex_block, rollout


class Forced(Sampler):
    """Drafts given tokens and remembers the logits that it was offered."""

    def force(self, tokens):
        self.tokens, self.seen = list(tokens), []
        return self

    def draft(self, logits, count=1):
        self.seen.append(logits)
        return torch.tensor([[self.tokens[len(self.seen) - 1]]]), None


HEADS = {
    "EAGLE-3": {},
    "two layers": {"layers": 2},
    "EAGLE-3.1, narrower": {"width": 16, "norm_taps": True, "norm_state": True},
    "EAGLE-1": {"kind": "eagle1", "fc_bias": True},
    "unshifted": {"kind": "eagle1", "inputs": "unshifted"},
}


@pytest.mark.parametrize("kind", HEADS)
def test_rollout_and_decoder_give_equal_logits_at_every_depth(kind):
    """FAULTS 23: the same tokens through the training rollout and through drafting, depths 1 … 7."""
    target = tiny_target()
    head = a_head(target, **HEADS[kind])
    batch = a_batch(target, [24])
    states = list(rollout(head, batch.token_ids, batch.taps if head.config.taps else batch.last, STEPS))
    tokens = batch.token_ids[0].tolist()
    for slot in (0, 5, 12):
        drafter = EagleDrafter(head)
        drafter.begin(1, 64)
        sampler = Forced(0.0).force(tokens[slot + 2 :])
        known = slot + 2  # x_0 … x_{slot+1} are committed, the target has read all but the last
        committed = Committed(
            [tokens[:known]], batch.last[:, : slot + 1], batch.taps[:, : slot + 1], torch.tensor([slot + 1])
        )
        drafter.propose(committed, chain_shape(STEPS), sampler)
        for k in range(STEPS):
            torch.testing.assert_close(sampler.seen[k][0], head.logits(states[k][0, slot]), atol=1e-4, rtol=0)


def test_detached_steps_have_the_same_values_and_no_gradient_between_them():
    target = tiny_target()
    head = a_head(target)
    with torch.no_grad():
        head.layers[0].self_attn.o_proj.weight.zero_()  # what is left between the steps is the state that they hand on
    batch = a_batch(target, [12])
    taps = batch.taps.clone().requires_grad_()
    whole, cut = (list(rollout(head, batch.token_ids, taps, 3, detach)) for detach in (False, True))
    for k in range(3):
        torch.testing.assert_close(whole[k], cut[k])
        for states, flows in ((whole, True), (cut, k == 0)):
            (reached,) = torch.autograd.grad(states[k].sum(), taps, allow_unused=True, retain_graph=True)
            assert (reached is not None and bool(reached.any())) == flows


def test_drafting_again_after_acceptance_uses_true_features_only():
    """The second proposal equals a first one made from scratch: nothing of the drafted entries is left."""
    target = tiny_target()
    head = a_head(target)
    batch = a_batch(target, [24])
    tokens = batch.token_ids[0].tolist()

    def logits(steps):
        drafter = EagleDrafter(head)
        drafter.begin(1, 64)
        read = 0
        for known in steps:
            sampler = Forced(0.0).force([7] * 5)
            states = slice(read, known - 1)
            drafter.propose(
                Committed(
                    [tokens[:known]], batch.last[:, states], batch.taps[:, states], torch.tensor([known - 1 - read])
                ),
                chain_shape(5),
                sampler,
            )
            read = known - 1
        return torch.stack(sampler.seen)

    torch.testing.assert_close(logits([4, 7, 8, 12]), logits([12]), atol=1e-4, rtol=0)


def test_draft_lm_gives_equal_logits_in_training_and_in_drafting():
    target = tiny_target()
    draft = DraftLM.from_target_blocks(target, [0, 3])
    ids = a_batch(target, [24]).token_ids
    trained = draft.forward(ids).logits[0]
    tokens = ids[0].tolist()
    drafter = LMDrafter(draft)
    drafter.begin(1, 64)
    for known in (3, 5, 9):
        sampler = Forced(0.0).force(tokens[known:])
        drafter.propose(Committed([tokens[:known]], None, None, None), chain_shape(STEPS), sampler)
        for k in range(STEPS):
            torch.testing.assert_close(sampler.seen[k][0], trained[known - 1 + k], atol=1e-4, rtol=0)


def per_slot_losses(objective, batch):
    """Loss of every slot at every step, NaN where it is not trained."""
    result = []
    for k, (slots, logits) in enumerate(objective.predictions(batch)):
        values = torch.full(slots.shape, float("nan"))
        values[slots] = plain(objective.loss, logits, objective.cached_teacher(batch, slots, k))
        result.append(values)
    return torch.stack(result)


@pytest.mark.parametrize("which", [0, 1])
def test_changing_a_token_leaves_every_earlier_prediction_alone_at_every_depth(which):
    """FAULTS 27. Predictions of x_0 … x_{t−1} do not move when token t changes; some later one does."""
    target = tiny_target()
    objective = objectives(target)[which]
    batch = a_batch(target, [24])
    before = per_slot_losses(objective, batch)
    for t in (13, 17, 22):
        ids = batch.token_ids.clone()
        ids[0, t] = 5 if int(ids[0, t]) != 5 else 4
        out = target.forward(ids, TAPS)
        log_probs, top = out.logits.log_softmax(-1).topk(5)
        after = per_slot_losses(
            objective, Batch(ids, batch.supervised, batch.lengths, out.taps, out.last, TopK(top, log_probs))
        )
        moved = (after - before).abs() > 1e-6
        for k in range(objective.steps):
            # Slot s at step k predicts x_{s+lead+k}: its inputs and teacher end one token before.
            assert not moved[k, 0, : max(0, t + 1 - objective.lead - k)].any(), (t, k)
        assert moved.any()


@pytest.mark.parametrize("which", [0, 1])
def test_neighbours_and_padding_change_nothing(which):
    """FAULTS 27: row A keeps its losses when row B changes, when B is longer, and when A stands alone."""
    target = tiny_target()
    objective = objectives(target)[which]
    alone = a_batch(target, [16])
    values = per_slot_losses(objective, alone)
    for other in (16, 30):
        torch.manual_seed(9)
        both_ids = torch.zeros(2, max(16, other), dtype=torch.long)
        both_ids[0, :16], both_ids[1, :other] = alone.token_ids[0], torch.randint(6, 100, (other,))
        lengths = torch.tensor([16, other])
        out = target.forward(both_ids, TAPS)
        log_probs, top = out.logits.log_softmax(-1).topk(5)
        place = torch.arange(both_ids.shape[1])[None]
        supervised = (place >= lengths[:, None] // 2) & (place < lengths[:, None])
        together = per_slot_losses(
            objective, Batch(both_ids, supervised, lengths, out.taps, out.last, TopK(top, log_probs))
        )
        torch.testing.assert_close(together[:, 0, :16], values[:, 0], atol=1e-5, rtol=1e-5, equal_nan=True)


def test_a_batch_with_nothing_supervised_has_loss_0_and_finite_gradients():
    target = tiny_target()
    batch = a_batch(target, [8, 8])
    empty = Batch(
        batch.token_ids, torch.zeros_like(batch.supervised), batch.lengths, batch.taps, batch.last, batch.teacher
    )
    for objective in objectives(target):
        sums = objective(empty)
        sums.loss.backward()
        assert sums.loss.item() == 0
        assert objective.weight(empty) == 0
        assert all(p.grad is None or torch.isfinite(p.grad).all() for p in objective.parameters())


def dense_attention(query, keys, values):
    """One softmax over [T, T + K T] scores: what the merged one must equal."""
    slots, scale = query.shape[2], query.shape[3] ** -0.5
    own = torch.eye(slots, dtype=torch.bool)
    allowed = torch.cat([torch.ones(slots, slots, dtype=torch.bool).tril(), *[own] * (len(keys) - 1)], dim=1)
    scores = (query @ torch.cat(keys, dim=2).mT * scale).masked_fill(~allowed, float("-inf"))
    return scores.softmax(-1) @ torch.cat(values, dim=2)


def attended(slots, steps, attend):
    """Outputs of every step and the gradient of all inputs, in fp64, and the bytes kept for the way back."""
    torch.manual_seed(0)
    inputs = [torch.randn(3, 1, 2, slots, 4, dtype=torch.float64, requires_grad=True) for _ in range(steps)]
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = (
            tensor.untyped_storage().nbytes(),
            tensor,
        )  # alive: no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outs = [attend(k, inputs) for k in range(steps)]
        total = sum(out.sin().sum() for out in outs)
    size = sum(bytes_ for bytes_, _ in kept.values())
    return outs, torch.autograd.grad(total, inputs), size


def merged(block=None):
    attention = RolloutAttention(block)
    return lambda k, inputs: attention(0, *inputs[k])


@pytest.mark.parametrize("slots", [1, 7, 40])
def test_the_merged_attention_of_every_step_equals_the_dense_one(slots, monkeypatch):
    """FAULTS 67: values and gradients, whole and in pieces of 16 queries."""
    wanted = attended(
        slots, 4, lambda k, xs: dense_attention(xs[k][0], [x[1] for x in xs[: k + 1]], [x[2] for x in xs[: k + 1]])
    )
    for piece in (256, 16):
        monkeypatch.setattr("draftsmith.train.rollout.SLOTS", piece)
        got = attended(slots, 4, merged())
        for a, b in zip((*got[0], *got[1]), (*wanted[0], *wanted[1]), strict=True):
            torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


def test_what_a_rollout_keeps_grows_with_the_length_and_not_with_its_square(monkeypatch):
    """FAULTS 67: under 2.3 × per doubling."""
    monkeypatch.setattr("draftsmith.train.rollout.SLOTS", 32)
    sizes = [attended(slots, 7, merged())[2] for slots in (128, 256, 512)]
    assert sizes[1] / sizes[0] < 2.3
    assert sizes[2] / sizes[1] < 2.3
    monkeypatch.setattr(
        "draftsmith.train.rollout.SLOTS", 512
    )  # in one piece the scores are kept: the measure sees them
    assert attended(512, 7, merged())[2] / attended(256, 7, merged())[2] > 3


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_gives_the_block_that_every_device_has():
    """Forward alone: FlexAttention has no backward on a CPU. The merge around it is the same code."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 50, 16)
    with torch.no_grad():
        for got, wanted in zip(flex_block(query, key, value), causal_block(query, key, value), strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
