"""Every architecture of tests/architectures.py: exact from forward pass through cache to tree verify, or refused by name."""

from pathlib import Path

import pytest
import torch
from architectures import BY_NAME, ENCODER_DECODERS, MOST, REFUSED, SUPPORTED, new_model, page_tables, target_of
from kit import WINDOW, tiny_model, tiny_rows, tiny_target
from torch.nn import functional as F

from draftsmith.data.cache.build import build_cache
from draftsmith.data.cache.manifest import CacheSettings
from draftsmith.data.cache.reader import CacheReader
from draftsmith.errors import UserError
from draftsmith.models import lm
from draftsmith.models.target import Target, load_model

NAMES = [entry.name for entry in SUPPORTED]
FINAL_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm")
LENGTHS = [3 * WINDOW, 9, 2, 17]  # windows are crossed
#        root ── a
#           └── b ── c
TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)[None]
DEPTHS = torch.tensor([[0, 1, 1, 2]])


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return tiny_rows(tmp_path_factory.mktemp("rows"), LENGTHS)


@pytest.mark.parametrize("name", MOST)
def test_logits_rebuilt_from_the_cache_are_the_models_own_and_batching_changes_nothing(name, rows, tmp_path):
    """FAULTS 12 and 13: rows alone and rows padded in one batch; KL per token against a plain forward of the library."""
    target = target_of(name)
    caches = []
    for batch_tokens in (1, 1000):
        folder = tmp_path / str(batch_tokens)
        build_cache(
            target,
            rows,
            folder,
            CacheSettings(distribution="topk", state_codec="fp32", last=True, k=8, batch_tokens=batch_tokens),
        )
        caches.append(CacheReader(folder, target.fingerprint()))
    for alone, padded in zip(*caches, strict=True):
        ids = torch.from_numpy(alone.token_ids).long()[None]
        with torch.no_grad():
            log_p = target.model(ids).logits[0].double().log_softmax(-1)
            log_q = target.head(torch.from_numpy(alone.last)).double().log_softmax(-1)
        assert (log_p.exp() * (log_p - log_q)).sum(-1).max() < 1e-6
        kept = torch.from_numpy(alone.distribution[1]).double()
        torch.testing.assert_close(kept, log_p.topk(8).values, atol=1e-5, rtol=0)
        for ours, theirs in ((alone.last, padded.last), (alone.taps, padded.taps)):
            scale = float(abs(ours).max())
            torch.testing.assert_close(torch.from_numpy(ours), torch.from_numpy(theirs), atol=1e-5 * scale, rtol=0)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_taps_are_the_outputs_of_blocks_counted_from_0_before_the_final_norm(name):
    target = target_of(name)
    ids = torch.randint(6, 100, (2, 12), generator=torch.Generator().manual_seed(0))
    out = target.forward(ids, range(4))
    states = target.model(ids, output_hidden_states=True).hidden_states
    for block in range(3):
        torch.testing.assert_close(out.taps[:, :, block], states[block + 1], atol=0, rtol=0)
        assert not torch.allclose(out.taps[:, :, block], states[block])
    final = [
        m
        for place, m in target.model.base_model.named_modules()
        if place.split(".")[-1] in FINAL_NORMS and "layers." not in place
    ]
    torch.testing.assert_close(final[-1](out.taps[:, :, 3]), out.last)
    assert not torch.allclose(out.taps[:, :, 3], out.last)


@pytest.mark.parametrize("flavour", ["two-blocks", "three-blocks", "plain"])
@torch.no_grad()
def test_a_tap_sums_the_constants_of_the_blocks_up_to_its_own(flavour):
    """FAULTS 14: block i does nothing but add 10^i to the residual stream."""
    model = tiny_model(flavour)
    for number, block in enumerate(model.model.layers):
        block.self_attn.o_proj.weight.zero_()
        block.mlp.down_proj.register_forward_hook(
            lambda _module, _inputs, output, number=number: torch.full_like(output, 10.0**number)
        )
    target = Target(model)
    ids = torch.randint(6, 100, (1, 5))
    out = target.forward(ids, range(target.blocks))
    embedded = model.model.embed_tokens(ids)
    for tap in range(target.blocks):
        constant = float("1" * (tap + 1))
        torch.testing.assert_close(out.taps[:, :, tap], embedded + constant, atol=1e-3, rtol=0)
    torch.testing.assert_close(out.last, model.model.norm(embedded + float("1" * target.blocks)), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_one_tree_verify_equals_a_forward_of_each_branch_alone(name):
    """Two rows of unequal length, both beyond the window, so that it cuts into the committed tokens."""
    target, generator = target_of(name), torch.Generator().manual_seed(1)
    ids = torch.randint(6, 100, (2, 14), generator=generator)
    trees, lengths = torch.randint(6, 100, (2, 4), generator=generator), [14, 11]
    cache = target.new_cache(2, 32)
    target.forward(ids, cache=cache, want_logits=False)
    cache.set_lengths(torch.tensor(lengths))
    logits = target.forward(trees, cache=cache, visible=TREE, depths=DEPTHS).logits
    for row, length in enumerate(lengths):
        for branch in ([0, 1], [0, 2, 3]):
            alone = target.model(torch.cat([ids[row, :length], trees[row, branch]])[None]).logits[0, length:]
            torch.testing.assert_close(logits[row, branch], alone, atol=3e-5, rtol=0)


def folder_of(config, folder: Path) -> str:
    """A model folder whose weights would be an error if they were read."""
    config.save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"never read")
    return str(folder)


@pytest.mark.parametrize("name", [entry.name for entry in (*REFUSED, *ENCODER_DECODERS) if entry.name != "BERT"])
def test_what_cannot_be_exact_is_refused_by_name_before_its_weights_are_read(name, tmp_path):
    config = BY_NAME[name].new_config()
    with pytest.raises(UserError, match=f"^{config.model_type}: .*not supported") as caught:
        load_model(folder_of(config, tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["Mamba", "Qwen3-Next", "RWKV", "Falcon, ALiBi", "BERT"])
def test_a_refused_model_that_is_loaded_already_is_refused_too(name):
    entry = BY_NAME[name]
    with pytest.raises(UserError, match=entry.new_config().model_type):
        Target(new_model(entry))


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("RWKV", {}, "a branch of a token tree"),
        ("MPT", {}, "a branch of a token tree"),
        ("GPT-Neo", {"window_size": 2}, "a branch of a token tree"),
        ("BLOOM", {}, "does not take our cache and masks"),
        ("Falcon, ALiBi", {}, "does not take our cache and masks"),
    ],
)
def test_what_is_refused_by_name_fails_the_measurement_as_well(name, options, reason, monkeypatch):
    """The names save reading the weights; an architecture nobody has named is caught by running a tree through it."""
    monkeypatch.setattr(lm, "refuse_unsupported", lambda config: None)
    with pytest.raises(UserError, match=reason):
        Target(new_model(BY_NAME[name], **options))


def longrope(original: int):
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 4.0, 8.0, 16.0],
        "original_max_position_embeddings": original,
    }
    return Target(new_model(BY_NAME["Phi-3"], rope_parameters=parameters, original_max_position_embeddings=original))


@torch.no_grad()
def test_longrope_is_exact_up_to_its_original_length_and_not_used_beyond():
    target, ids = longrope(16), torch.arange(6, 30)[None]
    assert target.context == 16
    cache = target.new_cache(1, 24)
    target.forward(ids[:, :10], cache=cache)
    cache.set_lengths(torch.tensor([10]))
    within = target.forward(ids[:, 10:16], cache=cache).logits
    torch.testing.assert_close(within, target.model(ids[:, :16]).logits[:, 10:], atol=1e-5, rtol=0)
    # Beyond, cached keys keep the short frequencies while a pass from scratch has the long ones for all.
    cache.set_lengths(torch.tensor([16]))
    beyond = target.forward(ids[:, 16:], cache=cache).logits
    assert not torch.allclose(beyond, target.model(ids).logits[:, 16:], atol=1e-2)


def test_a_model_in_bf16_passes_the_measurement():
    for name in ("Llama", "Gemma 2", "GPT-2"):
        assert Target(new_model(BY_NAME[name]).to(torch.bfloat16)).dtype == torch.bfloat16


@torch.no_grad()
def test_measurement_takes_vocabularies_smaller_than_its_tree():
    target = tiny_target(vocabulary=5)
    assert F.softmax(target.forward(torch.tensor([[4]])).logits, -1).shape[-1] == 5


def test_the_page_lists_what_these_tests_hold():
    page = (Path(__file__).parents[2] / "docs" / "architectures.md").read_text(encoding="utf-8")
    for table in page_tables().split("\n\n"):
        assert table in page, "docs/architectures.md: paste what tests/architectures.page_tables() returns"
