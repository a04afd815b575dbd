"""`draftsmith import-states` from the command line, and an EAGLE head trained on what it leaves behind."""

from pathlib import Path

import numpy as np
import pytest
import torch
from kit import tiny_target_folder

from draftsmith.cli import main
from draftsmith.models.target import Target

CONFIG = """
run_root: {root}/runs
data: {{sources: [{{kind: json, path: {root}/rows.jsonl}}], max_length: 64, held_out: 0.3}}
target: {{path: {target}}}
cache: {{distribution: topk, k: 16, taps: [0, 1, 2]}}
eagle: {{head: {{rollouts: 1, tokens: 200, batch_tokens: 128, validations: 1, held_out_rows: 1}}}}
evaluation: {{drafts: [head]}}
tracking: {{trackers: []}}
"""


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*map(str, arguments)])
    return int(ended.value.code or 0)


def test_a_head_is_trained_on_an_imported_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_target_folder(tmp_path)
    (tmp_path / "rows.jsonl").write_text("\n".join(f'{{"text": "the quick brown fox {i}"}}' for i in range(12)))
    config = tmp_path / "exp.yaml"
    config.write_text(CONFIG.format(root=tmp_path, target=folder))
    target, dump, rng = Target.load(folder), tmp_path / "dump", np.random.default_rng(0)
    dump.mkdir()
    for number in range(6):
        ids = torch.from_numpy(rng.integers(6, 100, 20))
        with torch.no_grad():
            out = target.forward(ids[None], (0, 1, 2))
        fields = {"hidden_state": out.last.bfloat16(), "aux_hidden_state": out.taps.flatten(2).bfloat16()}
        torch.save(fields | {"input_ids": ids, "loss_mask": torch.ones_like(ids)}, dump / f"data_{number}.ckpt")

    imported = ("cache.imported.layers=[0,1,2]",)
    section = [f"cache.imported.path={dump}", "cache.imported.format=specforge", *imported]
    assert run("plan", config, *section) == 0
    assert "cache: size unknown until" in " ".join(capsys.readouterr().out.split())
    assert run("import-states", config, "--from", dump, "--format", "specforge", *imported) == 0
    manifest = tmp_path / "runs" / "exp" / "cache" / "manifest.json"
    assert '"format": "specforge"' in manifest.read_text()
    assert "keep in" in capsys.readouterr().out
    written = manifest.stat().st_mtime_ns
    assert run("plan", config, *section) == 0
    assert "cache: 120 tokens in 6 rows" in " ".join(capsys.readouterr().out.split())
    assert run("train-eagle", config, *section) == 0
    assert manifest.stat().st_mtime_ns == written  # not made again
    assert (tmp_path / "runs" / "exp" / "eagle" / "head" / "model.safetensors").is_file()


def test_an_unknown_format_and_a_missing_option_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_target_folder(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n')
    config = tmp_path / "exp.yaml"
    config.write_text(CONFIG.format(root=tmp_path, target=folder))
    assert run("import-states", config, "--from", tmp_path, "--format", "gguf") == 2
    assert "cache.imported.format" in capsys.readouterr().err
    assert run("import-states", config, "--format", "specforge") == 2
