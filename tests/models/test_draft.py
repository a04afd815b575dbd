"""Draft LMs cut out of their target or built from scratch."""

import json
import math

import pytest
import torch
from architectures import BY_NAME, MOST, new_model, target_of
from kit import FLAVOURS, tiny_model, tiny_target, tiny_tokenizer
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config

from draftsmith.errors import UserError
from draftsmith.eval.decode import Decoding, decode
from draftsmith.eval.drafters import LMDrafter
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.tree import chain_shape
from draftsmith.models.draft import DraftLM, project, sizes
from draftsmith.models.few_rows import FEW
from draftsmith.models.target import Target
from draftsmith.train.settings import DistillSettings


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_draft_of_all_blocks_is_the_target(flavour):
    target = tiny_target(flavour)
    draft = DraftLM.from_target_blocks(target, range(target.blocks))
    ids = torch.randint(6, 100, (2, 20))
    torch.testing.assert_close(draft.forward(ids).logits, target.forward(ids).logits, atol=0, rtol=0)


def test_a_draft_of_some_blocks_runs_these_blocks():
    target = tiny_target()
    draft = DraftLM.from_target_blocks(target, [1, 3])
    model = target.model.model
    for new, old in enumerate((1, 3)):
        assert torch.equal(draft.model.model.layers[new].mlp.up_proj.weight, model.layers[old].mlp.up_proj.weight)
    assert draft.blocks == 2


def test_a_save_that_fails_leaves_the_draft_that_was_there(tmp_path, monkeypatch):
    target = tiny_target()
    folder = tmp_path / "draft"
    DraftLM.from_target_blocks(target, [0]).save(folder, target)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    draft = DraftLM.from_target_blocks(target, [1, 2])

    def breaks(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(target.tokenizer, "save_pretrained", breaks)  # after the weights
    with pytest.raises(OSError, match="No space"):
        draft.save(folder, target)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [place.name for place in tmp_path.iterdir()] == ["draft"]


def test_save_and_load_gives_the_same_logits(tmp_path):
    target = tiny_target()
    draft = DraftLM.from_scratch(target, {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 24}, seed=1)
    draft.save(tmp_path, target)
    ids = torch.randint(6, 100, (1, FEW + 2))  # of fewer rows the rounding depends on where the weights lie in memory
    loaded = DraftLM.load(tmp_path, target)
    torch.testing.assert_close(loaded.forward(ids).logits, draft.forward(ids).logits, atol=0, rtol=0)


@pytest.mark.parametrize("blocks", [[], [4], [-1]])
def test_blocks_that_the_target_does_not_have_are_refused(blocks):
    with pytest.raises(UserError, match=r"distill\.blocks"):
        DraftLM.from_target_blocks(tiny_target(), blocks)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"num_attention_heads": 0}, "zero"),
        ({"num_attention_heads": 3}, "not a multiple of the number of attention heads"),
        ({"num_key_value_heads": 3}, r"size of tensor"),  # built, and found impossible by running it
        ({"head_dim": 7}, "even rotary dimension"),
        ({"intermediate_size": -8}, "negative dimension"),
    ],
)
def test_impossible_shapes_are_refused_in_one_line(shape, reason):
    """FAULTS 47."""
    with pytest.raises(UserError, match=rf"distill\.shape.*{next(iter(shape))}.*{reason}") as caught:
        DraftLM.from_scratch(tiny_target(), shape, seed=0)
    assert "\n" not in str(caught.value)


def test_a_size_below_one_is_refused_by_the_settings():
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        DistillSettings(shape={"num_hidden_layers": 0})


@torch.no_grad()
def without(target, blocks, ids):
    """Logits of the target when all blocks but these hand their input on."""

    def pass_on(_, args, named, output):
        given = args[0] if args else named["hidden_states"]
        return (given, *output[1:]) if isinstance(output, tuple) else given

    modules = [module for i, module in enumerate(target.block_modules) if i not in blocks]
    hooks = [module.register_forward_hook(pass_on, with_kwargs=True) for module in modules]
    logits = target.forward(ids).logits
    for hook in hooks:
        hook.remove()
    return logits


def header(file):
    """(names → shapes, bytes of the header itself) of a safetensors file."""
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + size])
    return {name: entry["shape"] for name, entry in entries.items() if name != "__metadata__"}, 8 + size


def assert_saved_whole(draft, folder, ids):
    """Read by the library alone, the folder is the draft: every field, every logit, and no byte more than its tensors."""
    draft.save(folder, tiny_target())
    alone = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(alone(ids).logits, draft.forward(ids).logits)
    ours, theirs = (model.config.to_dict() for model in (draft.model, alone))
    assert {key: theirs.get(key) for key in ours if key != "_name_or_path"} == {
        key: value for key, value in ours.items() if key != "_name_or_path"
    }
    [file] = folder.glob("*.safetensors")
    shapes, size = header(file)
    assert file.stat().st_size == size + 4 * sum(map(math.prod, shapes.values()))
    numbers = dict(draft.model.named_parameters(remove_duplicate=False))
    kept = [
        value for name, value in draft.model.state_dict().items() if name not in numbers
    ]  # DeepSeek's router has one
    stored = sum(p.numel() for p in draft.model.parameters()) + sum(value.numel() for value in kept)
    assert sum(map(math.prod, shapes.values())) == stored


@pytest.mark.parametrize("name", MOST)
@torch.no_grad()
def test_in_every_architecture_a_cut_draft_runs_its_blocks_and_its_folder_is_the_whole_of_it(name, tmp_path):
    """FAULTS 45 and 50. Blocks 1 and 3 are of other kinds than blocks 0 and 1 where a target has several."""
    target = target_of(name)
    draft = DraftLM.from_target_blocks(target, [1, 3])
    ids = torch.randint(6, 100, (2, 20), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(draft.forward(ids).logits, without(target, [1, 3], ids))
    assert_saved_whole(draft, tmp_path, ids)


ROPE = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1234.0}
FLAGS = {
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "rope": ("Llama", {"rope_parameters": ROPE}),
    "partial rope": ("Phi", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.25}}),
    "no cap": ("Gemma 2", {"final_logit_softcapping": None}),
}


@pytest.mark.parametrize("flag", FLAGS)
@torch.no_grad()
def test_each_flag_of_the_target_is_the_drafts_and_survives_its_folder(flag, tmp_path):
    """FAULTS 45: and without the flag the same weights are another model, or none."""
    name, options = FLAGS[flag]
    target = Target(new_model(BY_NAME[name], **options), tiny_tokenizer())
    ids = torch.randint(6, 100, (1, 12), generator=torch.Generator().manual_seed(0))
    for kind, draft in (
        ("cut", DraftLM.from_target_blocks(target, [0, 3])),
        ("scratch", DraftLM.from_scratch(target, "half", seed=0)),
        ("narrow", DraftLM.narrowed(target, "half", seed=0)),
    ):
        assert_saved_whole(draft, tmp_path / kind, ids)
        for option, value in options.items():
            saved = getattr(draft.config, option)
            assert saved == value if not isinstance(value, dict) else value.items() <= saved.items()
    changed = type(target.config).from_pretrained(tmp_path / "cut")
    for option in options:
        setattr(changed, option, getattr(BY_NAME[name].new_config(), option))
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "cut", config=changed)
    cut = AutoModelForCausalLM.from_pretrained(tmp_path / "cut")
    assert not torch.allclose(other(ids).logits, cut(ids).logits)


def test_a_shared_head_is_stored_with_the_draft_and_a_tied_one_once(tmp_path):
    """FAULTS 50: a folder says by its tensors whose embedding and head they are: always the draft's own copy."""
    for flavour, names in (
        ("plain", {"model.embed_tokens.weight", "lm_head.weight"}),
        ("tied", {"model.embed_tokens.weight"}),
    ):
        target = tiny_target(flavour)
        for head in ("copied", "shared"):
            folder = tmp_path / f"{flavour}-{head}"
            DraftLM.from_target_blocks(target, [0, 3], head=head).save(folder, target)
            shapes, _ = header(folder / "model.safetensors")
            assert {name for name in shapes if "layers" not in name} == names | {"model.norm.weight"}


def test_blocks_that_are_another_thing_at_another_place_are_refused(monkeypatch):
    """Were a list of the configuration unknown, the draft would silently be another model."""
    target = Target(new_model(BY_NAME["SmolLM3"]), tiny_tokenizer())
    monkeypatch.setattr("draftsmith.models.draft.PER_BLOCK", ("layer_types",))
    with pytest.raises(UserError, match=r"distill\.blocks: \[1, 3\] compute something else.*name other blocks"):
        DraftLM.from_target_blocks(target, [1, 3])
    dense_first = Target(new_model(BY_NAME["DeepSeek-V3"]), tiny_tokenizer())
    with pytest.raises(UserError, match=r"distill\.blocks: \[3, 0\] need .*which the target has not"):
        DraftLM.from_target_blocks(dense_first, [3, 0])


def test_a_draft_with_fewer_rows_than_the_tokenizer_has_tokens_is_refused(tmp_path):
    tiny_model(vocabulary=149).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="149 tokens, the target's tokenizer 150"):
        DraftLM.load(tmp_path, tiny_target())


def with_rows(rows: int, size: int = 140):
    """A target whose head has `rows` rows and whose tokenizer has the first `size` tokens."""
    tokenizer = tiny_tokenizer()
    kept = {token: i for token, i in tokenizer.get_vocab().items() if i < size}
    tokenizer.get_vocab = lambda: kept
    return Target(tiny_model(vocabulary=rows), tokenizer)


@pytest.mark.parametrize("rows", [144, 160])
def test_vocabularies_padded_differently_draft_together_and_padding_is_never_emitted(tmp_path, monkeypatch, rows):
    """FAULTS 40: V = 152, draft 144 (or more than the target), tokenizer 140."""
    target = with_rows(152)
    draft_model = tiny_model(seed=1, vocabulary=rows)
    draft_model.save_pretrained(tmp_path)
    monkeypatch.setattr("draftsmith.models.draft.check_tokenizer", lambda *_: None)
    draft = DraftLM.load(tmp_path, target)
    assert (draft.vocabulary, draft.usable) == (152, 140)
    shape = DraftLM.shape_of(draft_model.config, target).model
    assert {n: p.shape for n, p in shape.named_parameters()} == {n: p.shape for n, p in draft.model.named_parameters()}
    ids = torch.randint(6, 100, (1, 12))
    torch.testing.assert_close(draft.forward(ids).logits[..., :140], draft_model(ids).logits[..., :140])
    for drafter in (LMDrafter(draft), LMDrafter(target)):
        results = decode(
            target,
            drafter,
            [[7, 8, 9]] * 8,
            Decoding(chain_shape(3), Sampler(2.0), max_new_tokens=40, eos_ids=frozenset()),
        )
        tokens = [token for result in results for token in result.tokens]
        assert len(tokens) == 320
        assert max(tokens) < 140


def test_another_tokenizer_of_the_same_size_is_refused_with_the_first_difference_named(tmp_path):
    """FAULTS 41."""
    target = tiny_target()
    DraftLM.from_target_blocks(target, [0]).save(tmp_path, target)
    path = tmp_path / "tokenizer.json"
    text = path.read_text(encoding="utf-8")
    first, second = (target.tokenizer.convert_ids_to_tokens(i) for i in (20, 31))
    swapped = text.replace(f'"{first}": 20,', '"x-x": 20,').replace(f'"{second}": 31,', f'"{first}": 31,')
    swapped = swapped.replace('"x-x": 20,', f'"{second}": 20,')
    assert swapped != text
    path.write_text(swapped, encoding="utf-8")
    with pytest.raises(UserError, match=f"id 20 is '{second}' in the draft's and '{first}' in the target's"):
        DraftLM.load(tmp_path, target)


def test_each_missing_tensor_is_named(tmp_path):
    """FAULTS 44."""
    target = tiny_target()
    DraftLM.from_target_blocks(target, [0]).save(tmp_path, target)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    for name in whole:
        save_file({key: value for key, value in whole.items() if key != name}, file, metadata={"format": "pt"})
        with pytest.raises(UserError, match=name.replace(".", r"\.")):
            DraftLM.load(tmp_path, target)


@pytest.mark.parametrize("flavour", ["plain", "tied"])
def test_a_shared_head_is_the_targets_and_training_the_draft_leaves_it_alone(tmp_path, flavour):
    """FAULTS 51."""
    target = tiny_target(flavour)
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    draft = DraftLM.from_target_blocks(target, [0, 3], head="shared")
    assert draft.model.lm_head.weight.data_ptr() == target.model.lm_head.weight.data_ptr()
    trained = [parameter for parameter in draft.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    draft.forward(torch.randint(6, 100, (1, 12))).logits.square().mean().backward()
    optimizer.step()
    draft.model.double()
    for name, value in target.model.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, before[name]), name
    assert not torch.equal(draft.model.model.norm.weight.float(), before["model.norm.weight"])
    draft.model.float()
    draft.save(tmp_path, target)
    alone = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(alone.lm_head.weight, before["lm_head.weight"])


@pytest.mark.parametrize("flavour", ["plain", "tied", "padded-vocab", "gemma2"])
def test_a_narrow_start_has_the_targets_rows_in_fewer_coordinates(tmp_path, flavour):
    """FAULTS 49 for draft LMs."""
    target = tiny_target(flavour)
    draft = DraftLM.narrowed(target, {"hidden_size": 16}, seed=0)
    embedding, narrow = target.model.get_input_embeddings().weight, draft.model.get_input_embeddings().weight
    u, s, _ = torch.linalg.svd(embedding, full_matrices=False)
    best = (u[:, :16] * s[:16]) @ (u[:, :16] * s[:16]).T  # inner products of the nearest matrix of rank 16
    torch.testing.assert_close(narrow @ narrow.T, best, atol=1e-4, rtol=1e-4)
    head, narrow_head = target.model.get_output_embeddings().weight, draft.model.get_output_embeddings().weight
    assert torch.equal(narrow_head, project(head, 16))
    draft.save(tmp_path, target)
    ids = torch.randint(6, 100, (1, 10))
    alone = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(alone(ids).logits, draft.forward(ids).logits)
    assert draft.width == 16


def test_a_narrow_start_must_be_narrower():
    with pytest.raises(UserError, match="narrower"):
        DraftLM.narrowed(tiny_target(), {"hidden_size": 32}, seed=0)


def test_named_shapes_follow_the_targets_architecture():
    target = tiny_target()
    assert sizes(target, "half") == {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
    }
    assert DraftLM.from_scratch(target, "half", seed=0).width == 16
    config = GPT2Config(n_embd=32, n_layer=4, n_head=4, n_positions=64, vocab_size=150, bos_token_id=0, eos_token_id=0)
    gpt2 = Target(AutoModelForCausalLM.from_config(config), tiny_tokenizer())
    assert sizes(gpt2, "half") == {"n_layer": 2, "n_head": 2, "n_embd": 16}
    assert sizes(gpt2, {"hidden_size": 8, "n_layer": 1}) == {"n_embd": 8, "n_layer": 1}
    with pytest.raises(UserError, match=r"distill\.shape.*there are half"):
        DraftLM.from_scratch(target, "tiny", seed=0)


@pytest.mark.parametrize("shape", [{"hiden_size": 16}, {"vocab_size": 20}])
def test_a_misspelt_size_and_another_vocabulary_are_refused(shape):
    with pytest.raises(UserError, match=next(iter(shape))):
        DraftLM.from_scratch(tiny_target(), shape, seed=0)
