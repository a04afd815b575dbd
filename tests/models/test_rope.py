"""FAULTS 22 and 24: the EAGLE head's RoPE is its target's, for every type, in old and new config layouts, before training and
after save and load, and equals the formulas of the papers written out here."""

import json
import math

import pytest
import torch
from architectures import BY_NAME, new_model
from kit import CONTEXT, tiny_target_folder, tiny_tokenizer

from draftsmith.models.eagle import EagleHead, new_eagle_head
from draftsmith.models.target import Target, choose_taps
from draftsmith.models.vocabulary import DraftVocabulary

POSITIONS = [list(range(8)), list(range(100, 108)), [3, 17, 4, 90, 200]]
DIM = 8
THETA = 1e6
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
SETTINGS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN,
}


def plain(dim=DIM, theta=THETA):
    return torch.tensor([theta ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)


def llama3(frequencies):
    """Long wavelengths are stretched by the factor, short ones not, those between in proportion."""
    scaled = []
    for frequency in frequencies.tolist():
        turns = LLAMA3["original_max_position_embeddings"] * frequency / (2 * math.pi)
        share = min(1.0, max(0.0, (turns - LLAMA3["low_freq_factor"]) / 3.0))
        scaled.append(share * frequency + (1 - share) * frequency / LLAMA3["factor"])
    return torch.tensor(scaled, dtype=torch.float64)


def yarn(frequencies, dim, theta, factor, original, truncate=True):
    """Dimensions that turn 32 times or more within the original length stay, those below one turn are stretched."""

    def dimension(turns):
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(32.0), dimension(1.0)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return frequencies / factor * ramp + frequencies * (1 - ramp)


def formula(kind):
    """(frequencies, factor on cos and sin) of a setting."""
    base = plain()
    return {
        "default": (base, 1.0),
        "linear": (base / 4.0, 1.0),
        "dynamic": (base, 1.0),  # within the target's context nothing is scaled yet
        "llama3": (llama3(base), 1.0),
        "yarn": (yarn(base, DIM, THETA, 4.0, 64), 0.1 * math.log(4.0) + 1),
    }[kind]


def check(head, frequencies, scale):
    for positions in POSITIONS:
        cos, sin = head.rotary(torch.zeros(1), torch.tensor([positions]))
        angle = torch.tensor(positions, dtype=torch.float64)[:, None] * frequencies
        for ours, wanted in ((cos, angle.cos()), (sin, angle.sin())):
            torch.testing.assert_close(ours[0].double(), (scale * wanted).repeat(1, 2), atol=2e-5, rtol=0)


def head_of(target):
    return new_eagle_head(target, choose_taps(target.blocks), DraftVocabulary.all_of(target.vocabulary))


def before_and_after(target, folder):
    head = head_of(target)
    head.save(folder)
    return head, EagleHead.load(folder, target)


@pytest.mark.parametrize("layout", ["rope_parameters", "rope_scaling with rope_type", "rope_scaling with type"])
@pytest.mark.parametrize("kind", SETTINGS)
def test_every_type_in_every_config_layout(kind, layout, tmp_path):
    folder = tiny_target_folder(tmp_path)
    about = json.loads((folder / "config.json").read_text())
    about.pop("rope_parameters")
    if layout == "rope_parameters":
        about["rope_parameters"] = {"rope_type": kind, "rope_theta": THETA, **SETTINGS[kind]}
    else:
        about["rope_theta"] = THETA
        about["rope_scaling"] = None if kind == "default" else {layout.split()[-1]: kind, **SETTINGS[kind]}
    (folder / "config.json").write_text(json.dumps(about))
    target = Target.load(folder)
    for head in before_and_after(target, tmp_path / "head"):
        check(head, *formula(kind))
        for positions in POSITIONS:
            place = torch.tensor([positions])
            theirs = target.model.model.rotary_emb(torch.zeros(1), place)
            torch.testing.assert_close(head.rotary(torch.zeros(1), place), theirs, atol=0, rtol=0)


@pytest.mark.parametrize("layout", ["new", "old"])
def test_a_part_of_each_head_is_turned_where_the_target_turns_a_part(layout, tmp_path):
    """GPT-NeoX: a quarter of 16 dimensions; the others pass unturned."""
    given = (
        {"rope_parameters": {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.25}}
        if layout == "new"
        else {"rotary_pct": 0.25, "rotary_emb_base": THETA}
    )
    target = Target(new_model(BY_NAME["GPT-NeoX"], **given), tiny_tokenizer())
    for head in before_and_after(target, tmp_path):
        check(head, plain(4), 1.0)
        rope = head.rotary(torch.zeros(1), torch.tensor([[5]]))
        queries = []

        def attend(_layer, query, key, value, queries=queries):
            queries.append(query)
            return query

        attention = head.first_layer.self_attn
        x = torch.randn(1, 1, attention.q_proj.in_features)
        attention(x, rope, 0, attend)
        unturned = attention.q_proj(x).view(1, 1, 4, 16).transpose(1, 2)
        assert torch.equal(queries[0][..., 4:], unturned[..., 4:])
        assert not torch.allclose(queries[0][..., :4], unturned[..., :4])


def test_gpt_oss_yarn_without_truncation(tmp_path):
    target = Target(new_model(BY_NAME["gpt-oss"]), tiny_tokenizer())
    frequencies = yarn(plain(DIM, 150000.0), DIM, 150000.0, 4.0, CONTEXT // 4, truncate=False)
    for head in before_and_after(target, tmp_path):
        check(head, frequencies, 0.1 * math.log(4.0) + 1)
        place = torch.tensor([POSITIONS[2]])
        for ours, theirs in zip(
            head.rotary(torch.zeros(1), place), target.model.model.rotary_emb(torch.zeros(1), place), strict=True
        ):
            assert torch.equal(ours, theirs.repeat(1, 1, 2))  # gpt-oss keeps one half of the pairs


@pytest.mark.parametrize("layout", ["new", "old"])
def test_of_gemma_3s_two_bases_the_head_takes_that_of_full_attention(layout, tmp_path):
    given = (
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": THETA},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            }
        }
        if layout == "new"
        else {
            "rope_theta": THETA,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        }
    )
    target = Target(new_model(BY_NAME["Gemma 3 (text)"], **given), tiny_tokenizer())
    for head in before_and_after(target, tmp_path):
        check(head, plain() / 8.0, 1.0)


@pytest.mark.parametrize("kind", ["longrope", "yarn"])
def test_a_factor_that_the_config_leaves_out_is_the_targets_ratio_of_lengths(kind, tmp_path):
    """Both lengths are needed for it, and the head's context ends where a longrope target's frequencies would turn."""
    settings = {
        "rope_type": kind,
        "rope_theta": THETA,
        "original_max_position_embeddings": CONTEXT // 4,
        "factor": None,
    }
    if kind == "longrope":
        settings |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 4.0, 8.0, 16.0]}
        options = {"original_max_position_embeddings": CONTEXT // 4}
        frequencies = plain() / torch.tensor(settings["short_factor"], dtype=torch.float64)
        scale = math.sqrt(1 + math.log(4) / math.log(CONTEXT // 4))
        target = Target(new_model(BY_NAME["Phi-3"], rope_parameters=settings, **options), tiny_tokenizer())
    else:
        frequencies, scale = formula("yarn")
        target = Target(new_model(BY_NAME["Llama"], rope_parameters=settings), tiny_tokenizer())
    for head in before_and_after(target, tmp_path):
        place = torch.tensor([list(range(8))])
        cos, sin = head.rotary(torch.zeros(1), place)
        angle = torch.arange(8, dtype=torch.float64)[:, None] * frequencies
        torch.testing.assert_close(cos[0].double(), (scale * angle.cos()).repeat(1, 2), atol=2e-5, rtol=0)
        theirs = target.model.model.rotary_emb(torch.zeros(1), place)
        torch.testing.assert_close((cos, sin), theirs, atol=0, rtol=0)
