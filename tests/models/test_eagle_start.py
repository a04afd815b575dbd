"""Where the layer of an untrained EAGLE-3 head starts: from the joined token's embedding, or from the target's states."""

import pytest
import torch
from architectures import target_of
from kit import tiny_target

from draftsmith.errors import UserError
from draftsmith.models.eagle import new_eagle_head
from draftsmith.models.eagle_start import Text
from draftsmith.models.vocabulary import DraftVocabulary
from draftsmith.train.rollout import rollout

TAPS = (0, 1, 2)


def rms(x, gain, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gain


@pytest.mark.parametrize("shape", [(4, 4, 8), (4, 2, 16), (2, 2, 12)], ids=["as wide", "wider", "narrower"])
def test_started_from_the_embedding_a_head_predicts_what_its_output_head_reads_there(shape):
    """At every rollout step, far above chance (1 in 150), which is where a head without that start stands; whatever the width of
    the target's attention (32 of 32, 64, 24)."""
    heads, kv_heads, head_dim = shape
    target = tiny_target(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim)
    torch.manual_seed(0)
    taps, tokens = torch.randn(400, 3, target.width), torch.randint(6, 100, (1, 400))
    joined = target.model.get_input_embeddings()(tokens)

    def agreement(start):
        full, texts = DraftVocabulary.all_of(target.vocabulary), [Text(taps, joined[0], None)]
        head = new_eagle_head(target, TAPS, full, start=start, texts=texts)
        wanted = head.lm_head(rms(joined, torch.ones(target.width), 1e-6)).argmax(-1)[0]
        states = list(rollout(head, tokens, taps[None], 3))
        return [
            (head.logits(s)[0, : 399 - k].argmax(-1) == wanted[1 + k :]).float().mean().item()
            for k, s in enumerate(states)
        ]

    assert min(agreement("embedding")) > 0.15
    assert max(agreement(None)) < 0.03


def test_a_vocabulary_too_small_for_that_start_is_refused():
    target = tiny_target()
    small = DraftVocabulary(torch.arange(10), target.vocabulary)
    with pytest.raises(UserError, match="value dimensions"):
        new_eagle_head(target, TAPS, small, start="embedding", texts=MadeText(target, 1).texts())


class MadeText:
    """Texts of a target whose states are functions of what a slot reads: h_t linear in the taps, h_{t+1} in norm(e_{t+1}) and
    norm(h_t), but for `bend` times a product of two linear functions of that."""

    def __init__(self, target, rows, length=8, seed=2, bend=0.0, words=94):
        width, generator = target.width, torch.Generator().manual_seed(1)
        shapes = ((width, width), (width, width), (3 * width, width))
        of_token, of_state, to_taps = (torch.randn(shape, generator=generator) / width**0.5 for shape in shapes)
        left, right = (torch.randn(3, width, generator=generator) / width**0.5 for _ in range(2))
        spread = torch.randn(3, width, generator=generator)
        generator.manual_seed(seed)
        self.tokens = torch.randint(6, 6 + words, (rows, length), generator=generator)
        self.embeddings = target.model.get_input_embeddings()(self.tokens).detach()
        states = [torch.randn(rows, width, generator=generator)]
        for t in range(1, length):
            token = rms(self.embeddings[:, t], torch.ones(width), 1e-6)
            linear = token @ of_token.T + 0.5 * rms(states[-1], torch.ones(width), 1e-6) @ of_state.T
            states.append(linear + bend * (linear @ left.T * (linear @ right.T)) @ spread)
        self.states = torch.stack(states, 1)
        self.taps = (self.states @ to_taps.T).unflatten(-1, (3, width))

    def texts(self, joins=1):
        """joins: which token a slot is said to join, 1 for the next one."""
        rows = zip(self.taps, self.embeddings.roll(1 - joins, dims=1), self.states, strict=True)
        return [Text(taps, embeddings, states) for taps, embeddings, states in rows]


def explained(head, text, steps):
    """R² of the head's states for the states that they stand for, at every rollout step."""
    found = []
    features = text.taps if head.config.taps else text.states
    for k, states in enumerate(rollout(head, text.tokens, features, steps)):
        wanted, guess = text.states[:, 1 + k :], states[:, : text.states.shape[1] - 1 - k].detach()
        found.append(1 - float((guess - wanted).pow(2).sum() / (wanted - wanted.mean((0, 1))).pow(2).sum()))
    return found


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(4, 8), (2, 16)])
def test_started_from_the_states_a_head_guesses_the_targets_next_state_at_every_rollout_step(kv_heads, head_dim):
    """A slot that joins another token than the next one, or no such start, explains nothing."""
    target = tiny_target(num_key_value_heads=kv_heads, head_dim=head_dim)
    text, unseen = MadeText(target, 60), MadeText(target, 20, seed=3)

    def started(start, joins=1):
        full = DraftVocabulary.all_of(target.vocabulary)
        return explained(new_eagle_head(target, TAPS, full, start=start, texts=text.texts(joins)), unseen, 3)

    assert min(started("states")) > 0.7
    assert max(started("states", joins=0)) < 0.3
    assert max(started(None)) < 0.1


def test_a_slot_is_not_blurred_by_others_of_the_same_token():
    """Texts of three words: told apart by its embedding alone, a slot would look at every third one."""
    target = tiny_target(num_key_value_heads=4)
    text, unseen = (MadeText(target, rows, length=40, seed=rows, words=3) for rows in (60, 20))
    full = DraftVocabulary.all_of(target.vocabulary)
    head = new_eagle_head(target, TAPS, full, start="states", texts=text.texts())
    assert min(explained(head, unseen, 3)) > 0.6


def test_an_eagle1_head_started_from_the_states_guesses_the_next_one_too():
    target = tiny_target()
    text, unseen = MadeText(target, 200), MadeText(target, 50, seed=3)
    full = DraftVocabulary.all_of(target.vocabulary)

    def started(start, joins=1):
        head = new_eagle_head(target, (), full, kind="eagle1", start=start, texts=text.texts(joins))
        return explained(head, unseen, 3)

    assert min(started("states")) > 0.7
    assert max(started("states", joins=0)) < 0.3
    assert max(started(None)) < 0.1


def test_the_mlp_guesses_what_linear_maps_cannot():
    """Without its last projection the same head explains less of texts that bend, and of straight ones as much."""
    target = tiny_target(num_key_value_heads=4)

    def gain(bend):
        text, unseen = MadeText(target, 400, bend=bend), MadeText(target, 50, seed=3, bend=bend)
        shape, full = {"kv_heads": 4, "intermediate": 512}, DraftVocabulary.all_of(target.vocabulary)
        head = new_eagle_head(target, TAPS, full, start="states", texts=text.texts(), **shape)
        whole = explained(head, unseen, 2)
        head.first_layer.mlp.down_proj.weight.data.zero_()
        return [a - b for a, b in zip(whole, explained(head, unseen, 2), strict=True)]

    assert min(gain(1.0)) > 0.1
    assert max(map(abs, gain(0.0))) < 0.05


def test_its_output_head_reads_states_of_the_size_that_the_targets_have():
    target = tiny_target(num_key_value_heads=4)
    text, full = MadeText(target, 40), DraftVocabulary.all_of(target.vocabulary)
    head = new_eagle_head(target, TAPS, full, kv_heads=4, start="states", texts=text.texts())
    size = text.states[:, 1:].pow(2).mean(-1).sqrt().mean()
    torch.testing.assert_close(head.norm.weight, size.expand(target.width), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("intermediate", "inputs"), [(64, 96), (200, 200)], ids=["the taps are the largest input", "the MLP's is"]
)
def test_a_start_from_states_reads_as_many_texts_as_its_largest_regression_needs_three_times(intermediate, inputs):
    """16 tokens for each input; of a target at work every reading is a forward pass."""
    target, read = tiny_target(), []
    text = MadeText(target, 1, length=101).texts()[0]

    class Texts:
        def __iter__(self):
            for number in range(100):
                read.append(number)
                yield text

    shape, full = {"intermediate": intermediate}, DraftVocabulary.all_of(target.vocabulary)
    new_eagle_head(target, TAPS, full, start="states", texts=Texts(), **shape)
    assert read == 3 * list(range(-(-16 * inputs // 101)))


@pytest.mark.parametrize("start", ["states", "embedding"])
@pytest.mark.parametrize(
    "shape",
    [{"kv_heads": 4}, {"kind": "eagle1", "inputs": "unshifted"}, {"inputs": "feature"}],
    ids=["more value dimensions than it is wide", "EAGLE-1 with other inputs", "no embedding read"],
)
def test_a_head_that_could_carry_nothing_on_is_refused_a_start(start, shape):
    target = tiny_target(head_dim=16)
    text, full = MadeText(target, 40), DraftVocabulary.all_of(target.vocabulary)
    new_eagle_head(target, TAPS, full, start=start, texts=text.texts())
    taps = () if "kind" in shape else TAPS
    with pytest.raises(UserError, match=f"no start from the {start}"):
        new_eagle_head(target, taps, full, start=start, texts=text.texts(), **shape)


def test_a_fresh_head_is_its_seeds_whatever_the_process_drew_before():
    """Biases included: another start would refuse to continue an interrupted training."""
    target, heads = tiny_target(), []
    for _ in range(2):
        torch.rand(17)
        full = DraftVocabulary.all_of(target.vocabulary)
        heads.append(new_eagle_head(target, TAPS, full, fc_bias=True, confidence=True, seed=3).state_dict())
    assert all(torch.equal(value, heads[1][name]) for name, value in heads[0].items())


@pytest.mark.parametrize("name", ["Llama", "Granite", "Cohere"])  # the last two scale their logits
def test_an_output_head_that_starts_from_the_targets_scales_as_it_does(name):
    target = target_of(name)
    half = DraftVocabulary(torch.arange(0, target.vocabulary, 2), target.vocabulary)
    head, last = new_eagle_head(target, TAPS, half), torch.randn(3, target.width)
    torch.testing.assert_close(head.lm_head(last), target.head(last)[:, half.target_ids])


def test_huge_states_in_first_tokens_do_not_spoil_a_start_from_the_states():
    """As of large models: two numbers of a thousand and more there, of the rest about 1."""
    target = tiny_target(num_key_value_heads=4)
    text, unseen = MadeText(target, 60), MadeText(target, 20, seed=3)
    text.taps[:, 0, :, 7] += 1e4
    text.taps[:, 0, :, 20] -= 5e3
    full = DraftVocabulary.all_of(target.vocabulary)
    head = new_eagle_head(target, TAPS, full, kv_heads=4, start="states", texts=text.texts())
    assert min(explained(head, unseen, 3)) > 0.6
