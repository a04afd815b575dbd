"""Dumps in the layouts of speculators and SpecForge, written from a tiny target, against our own cache of the same rows."""

import gzip
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from kit import tiny_rows, tiny_target
from safetensors.torch import load_file, save_file

from draftsmith.data.cache.build import build_cache
from draftsmith.data.cache.manifest import CacheSettings, ImportSettings
from draftsmith.data.cache.reader import CacheReader
from draftsmith.data.importers import dump_taps, import_states
from draftsmith.errors import UserError

LENGTHS = [12, 30, 7, 12, 25]
TAPS = (0, 1, 3)  # the last block's output too: it is not the last state


@torch.no_grad()
def live(target, ids):
    """(input_ids, taps [T, A, W], the state before the final norm, that after it) by hooks of the library's own modules."""
    before = []
    hook = target.model.model.norm.register_forward_pre_hook(lambda _module, inputs: before.append(inputs[0]))
    out = target.model(ids[None], output_hidden_states=True)
    hook.remove()
    blocks = [*out.hidden_states[1:-1], before[0]]
    return torch.stack([blocks[tap][0] for tap in TAPS], 1), before[0][0], out.hidden_states[-1][0]


def specforge(target, rows, folder, dtype, packed=False):
    for number, row in enumerate(rows):
        ids = torch.from_numpy(row.token_ids).long()
        taps, _, last = live(target, ids)
        fields = {
            "input_ids": ids,
            "loss_mask": torch.from_numpy(row.supervised).long(),
            "hidden_state": last[None].to(dtype),
            "aux_hidden_state": taps.flatten(1)[None].to(dtype),
        }
        place = folder / f"rows_{number // 2 * 2}-{number // 2 * 2 + 2}"
        place.mkdir(parents=True, exist_ok=True)
        if packed:
            with gzip.open(place / f"data_{number}.ckpt.gz", "wb") as file:
                torch.save(fields, file)
        else:
            torch.save(fields, place / f"data_{number}.ckpt")
    return ImportSettings(format="specforge", path=str(folder), layers=TAPS)


def speculators(target, rows, folder, dtype):
    (folder / "hidden_states").mkdir(parents=True)
    masks = []
    for number, row in enumerate(rows):
        ids = torch.from_numpy(row.token_ids).long()
        taps, before, _ = live(target, ids)
        stacked = torch.cat([taps, before[:, None]], 1).to(dtype)
        save_file({"hidden_states": stacked, "token_ids": ids}, folder / "hidden_states" / f"hs_{number}.safetensors")
        mask = row.supervised.astype(int).tolist()
        masks.append({"input_ids": ids.tolist(), "loss_mask": mask, "seq_len": len(mask)})
    Dataset.from_list(masks).save_to_disk(folder)
    return ImportSettings(format="speculators", path=str(folder), layers=tuple(tap + 1 for tap in TAPS))


DUMPS = {"specforge": specforge, "speculators": speculators}


def files_of(about):
    return sorted(p for form in ("*.ckpt", "hs_*") for p in Path(about.path).rglob(form))


def settings_for(about, **more):
    return CacheSettings(
        **{"distribution": "topk", "imported": about, "state_codec": "fp32", "last": True, "k": 8, **more}
    )


OWN = CacheSettings(
    distribution="topk", taps=TAPS, state_codec="fp32", last=True, k=8
)  # what an import is held against


@pytest.fixture
def rows(tmp_path):
    return tiny_rows(tmp_path, LENGTHS)


@pytest.mark.parametrize("flavour", ["plain", "gemma2", "padded-vocab"])
@pytest.mark.parametrize("form", DUMPS)
def test_an_imported_fp32_dump_equals_our_own_cache(form, flavour, rows, tmp_path):
    target = tiny_target(flavour)
    about = DUMPS[form](target, rows, tmp_path / "dump", torch.float32)
    import_states(target, settings_for(about), tmp_path / "run" / "cache")
    build_cache(target, rows, tmp_path / "own", OWN)
    imported, own = CacheReader(tmp_path / "run" / "cache", target.fingerprint()), CacheReader(tmp_path / "own")
    assert imported.manifest.fields == own.manifest.fields
    assert len(imported) == len(own) == len(LENGTHS)
    for ours, theirs in zip(own, imported, strict=True):
        assert (ours.token_ids == theirs.token_ids).all()
        assert (ours.supervised == theirs.supervised).all()
        for a, b in ((ours.taps, theirs.taps), (ours.last, theirs.last)):
            torch.testing.assert_close(torch.from_numpy(a), torch.from_numpy(b), atol=1e-5, rtol=1e-5)
        log_p, log_q = (torch.from_numpy(row.distribution[1]) for row in (ours, theirs))
        torch.testing.assert_close(log_p, log_q, atol=1e-4, rtol=0)


@pytest.mark.parametrize("form", DUMPS)
def test_a_bf16_dump_is_off_by_its_own_rounding_only(form, rows, tmp_path):
    """bf16 keeps 8 bits: 2⁻⁹ relative per number, and what the final norm and the head make of that."""
    target = tiny_target()
    about = DUMPS[form](target, rows, tmp_path / "dump", torch.bfloat16)
    import_states(target, settings_for(about), tmp_path / "run" / "cache")
    build_cache(target, rows, tmp_path / "own", OWN)
    for ours, theirs in zip(CacheReader(tmp_path / "own"), CacheReader(tmp_path / "run" / "cache"), strict=True):
        for a, b in ((ours.taps, theirs.taps), (ours.last, theirs.last)):
            error = abs(a - b).max(-1) / abs(a).max(-1)
            assert 0 < error.max() < 2**-8
        assert abs(ours.distribution[1] - theirs.distribution[1]).max() < 0.1


def test_gzipped_samples_are_read_and_masks_are_those_of_the_dump_but_for_token_0(rows, tmp_path):
    target = tiny_target()
    about = specforge(target, rows, tmp_path / "dump", torch.float32, packed=True)
    import_states(target, settings_for(about), tmp_path / "run" / "cache")
    for ours, theirs in zip(rows, CacheReader(tmp_path / "run" / "cache"), strict=True):
        assert (ours.supervised == theirs.supervised).all()
    path = tmp_path / "dump" / "rows_0-2" / "data_0.ckpt.gz"
    with gzip.open(path) as file:
        fields = torch.load(file, weights_only=True)
    fields["loss_mask"][:] = 1
    with gzip.open(path, "wb") as file:
        torch.save(fields, file)
    import_states(target, settings_for(about), tmp_path / "again" / "cache")
    assert CacheReader(tmp_path / "again" / "cache")[0].supervised.tolist() == [False] + [True] * 11


@pytest.mark.parametrize(
    ("form", "wrong", "reason"),
    [
        ("specforge", {"layers": (0, 1, 2)}, "tap 2 .* it is that of block 3"),
        ("specforge", {"layers": (1, 2, 3)}, "tap 0 .* it is that of block 0"),
        ("speculators", {"layers": (2, 3, 4)}, "tap 0 .* it is that of block 0"),
        ("speculators", {"layers": (0, 1, 3)}, "cache.imported.layers"),
        ("specforge", {"layers": (0, 1, 4)}, "cache.imported.layers"),
    ],
)
def test_layers_counted_the_other_way_are_refused_by_name(form, wrong, reason, rows, tmp_path):
    target = tiny_target()
    about = DUMPS[form](target, rows, tmp_path / "dump", torch.bfloat16).model_copy(update=wrong)
    with pytest.raises(UserError, match=reason) as caught:
        import_states(target, settings_for(about), tmp_path / "run" / "cache")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "cache").exists()


@pytest.mark.parametrize("form", DUMPS)
def test_a_last_state_of_the_other_convention_is_refused_by_name(form, rows, tmp_path):
    target = tiny_target()
    about = DUMPS[form](target, rows, tmp_path / "dump", torch.float32)
    for path, row in zip(files_of(about), rows, strict=True):
        _, before, last = live(target, torch.from_numpy(row.token_ids).long())
        if form == "specforge":
            torch.save(torch.load(path, weights_only=True) | {"hidden_state": before[None]}, path)
        else:
            fields = load_file(path)
            fields["hidden_states"] = torch.cat([fields["hidden_states"][:, :-1], last[:, None]], 1)
            save_file(fields, path)
    reason = "lies before the final norm" if form == "specforge" else "was normed twice"
    with pytest.raises(UserError, match=reason):
        import_states(target, settings_for(about), tmp_path / "run" / "cache")


@pytest.mark.parametrize("form", DUMPS)
def test_a_dump_of_another_target_is_refused(form, rows, tmp_path):
    about = DUMPS[form](tiny_target(seed=1), rows, tmp_path / "dump", torch.float32)
    with pytest.raises(UserError, match="nor of any other block"):
        import_states(tiny_target(), settings_for(about), tmp_path / "run" / "cache")


def change(path, **fields):
    """Write one file again with other fields; None takes one out."""
    packed = path.suffix == ".ckpt"
    old = torch.load(path, weights_only=True) if packed else load_file(path)
    new = {k: v for k, v in (old | fields).items() if v is not None}
    if packed:
        torch.save(new, path)
    else:
        save_file(new, path)


@pytest.mark.parametrize(
    ("form", "fields", "reason"),
    [
        ("specforge", {"loss_mask": None}, "field loss_mask is missing"),
        ("specforge", {"hidden_state": None}, "field hidden_state is missing"),
        ("specforge", {"logits": torch.zeros(3)}, "unknown field logits"),
        ("specforge", {"loss_mask": torch.ones(5, dtype=torch.long)}, r"loss_mask has shape \[5\]"),
        ("specforge", {"hidden_state": torch.zeros(1, 30, 31)}, r"hidden_state has shape \[1, 30, 31\]"),
        ("specforge", {"hidden_state": torch.full((1, 30, 32), torch.nan)}, "hidden_state is not finite"),
        ("specforge", {"input_ids": torch.full((30,), 999)}, "input_ids holds numbers that are no ids"),
        ("specforge", {"loss_mask": torch.full((30,), 2)}, "other numbers than 0 and 1"),
        ("speculators", {"token_ids": None}, "field token_ids is missing"),
        ("speculators", {"scale": torch.ones(30, 1, 1)}, "unknown field scale"),
        ("speculators", {"hidden_states": torch.zeros(30, 3, 32)}, r"hidden_states has shape \[30, 3, 32\]"),
        ("speculators", {"hidden_states": torch.zeros(30, 4, 32).to(torch.float8_e4m3fn)}, "bfloat16, float16 or"),
        ("speculators", {"token_ids": torch.full((30,), 7)}, "are not the input_ids of row 1"),
    ],
)
def test_missing_extra_and_misshapen_fields_are_named_with_their_file(form, fields, reason, rows, tmp_path):
    target = tiny_target()
    about = DUMPS[form](target, rows, tmp_path / "dump", torch.float32)
    path = files_of(about)[1]
    change(path, **fields)
    with pytest.raises(UserError, match=reason) as caught:
        import_states(target, settings_for(about), tmp_path / "run" / "cache")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("damage", ["truncated", "empty", "a pickle"])
@pytest.mark.parametrize("form", DUMPS)
def test_a_damaged_file_is_named_and_nothing_is_unpickled(form, damage, rows, tmp_path):
    target = tiny_target()
    about = DUMPS[form](target, rows, tmp_path / "dump", torch.float32)
    path = files_of(about)[3]
    if damage == "a pickle":
        torch.save({"input_ids": target.tokenizer}, path)  # an object of a class
    else:
        path.write_bytes(path.read_bytes()[:-100] if damage == "truncated" else b"")
    with pytest.raises(UserError, match="damaged") as caught:
        import_states(target, settings_for(about), tmp_path / "run" / "cache")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_a_missing_mask_and_an_empty_folder_are_named(rows, tmp_path):
    target = tiny_target()
    about = speculators(target, rows, tmp_path / "dump", torch.float32)
    files_of(about)[2].unlink()
    with pytest.raises(UserError, match=r"row 2 without states"):
        import_states(target, settings_for(about), tmp_path / "run" / "cache")
    elsewhere = tmp_path / "elsewhere" / "states"
    shutil.copytree(tmp_path / "dump" / "hidden_states", elsewhere)
    lone = about.model_copy(update={"path": str(elsewhere)})
    with pytest.raises(UserError, match=r"cache\.imported\.masks"):
        import_states(target, settings_for(lone), tmp_path / "run" / "cache")
    (tmp_path / "empty").mkdir()
    nothing = about.model_copy(update={"path": str(tmp_path / "empty")})
    with pytest.raises(UserError, match=r"cache\.imported\.path"):
        import_states(target, settings_for(nothing), tmp_path / "run" / "cache")


def test_a_dump_in_which_nothing_is_supervised_is_refused(rows, tmp_path):
    target = tiny_target()
    about = specforge(target, rows, tmp_path / "dump", torch.float32)
    for path in files_of(about):
        change(path, loss_mask=torch.load(path, weights_only=True)["loss_mask"] * 0)
    with pytest.raises(UserError, match="no token is supervised"):
        import_states(target, settings_for(about), tmp_path / "run" / "cache")


def test_a_dump_that_changed_is_not_mixed_with_the_cache_of_the_old_one(rows, tmp_path):
    target = tiny_target()
    about = specforge(target, rows, tmp_path / "dump", torch.bfloat16)
    first = import_states(target, settings_for(about), tmp_path / "run" / "cache")
    assert first["written_shards"] == 1
    assert import_states(target, settings_for(about), tmp_path / "run" / "cache")["written_shards"] == 0
    path = files_of(about)[0]
    change(path, hidden_state=torch.load(path, weights_only=True)["hidden_state"] * 1.01)
    with pytest.raises(UserError, match=r"data\.settings\.imported\.content"):
        import_states(target, settings_for(about), tmp_path / "run" / "cache")


@pytest.mark.parametrize("blocks", [7, 8, 32])
def test_each_projects_own_layers_are_the_same_tensors(blocks):
    """speculators' [2, L/2, L − 3] by input are SpecForge's [1, L/2 − 1, L − 4] by output."""
    by_output = dump_taps(ImportSettings(format="specforge", path="x"), blocks)
    named = ImportSettings(format="speculators", path="x", layers=(2, blocks // 2, blocks - 3))
    assert dump_taps(named, blocks) == by_output == (1, blocks // 2 - 1, blocks - 4)
    assert dump_taps(ImportSettings(format="speculators", path="x"), blocks) == by_output
