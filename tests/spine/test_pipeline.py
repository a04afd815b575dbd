"""The whole pipeline for real, on sixty made-up documents and models of a few thousand parameters."""

import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import WORDS
from offline import wandb_values

from draftsmith.cli import _load, _run, main
from draftsmith.evaluate import REPEATABLE
from draftsmith.run import RunFolder
from draftsmith.tracked import KEYS, documented

DRAFTS = ("untrained", "distilled", "eagle3-no-rollout", "eagle3", "prompt-lookup", "oracle")
CONFIG = """
run_root: {root}/runs
data: {{sources: [{{kind: json, path: {root}/rows.jsonl}}], max_length: 64, held_out: 0.2}}
target:
  device: cpu
  scratch: {{vocabulary: 300, width: 32, blocks: 4, heads: 2, kv_heads: 1, intermediate: 48, context: 128,
            tokens: 3000, batch_tokens: 256}}
cache: {{distribution: topk, k: 16}}
distill: {{tokens: 2000, batch_tokens: 256, validations: 1, held_out_rows: 2}}
eagle:
  eagle3-no-rollout: {{rollouts: 1, tokens: 2000, batch_tokens: 256, validations: 1, held_out_rows: 2}}
  eagle3: {{rollouts: 3, tokens: 2000, batch_tokens: 256, validations: 1, held_out_rows: 2, kv_heads: 2, draft_vocabulary: 200}}
evaluation: {{drafts: [{drafts}], prompts: 2, prompt_tokens: 16, max_new_tokens: 16, K: 3, timed_prompts: 1, held_out_rows: 2}}
tracking: {{trackers: []}}
"""


TRACKED = "tracking.trackers=[wandb]"


def document(rng: random.Random, chat: bool) -> dict[str, Any]:
    text = " ".join(rng.choice(WORDS) for _ in range(50))
    if not chat:
        return {"text": text}
    return {"messages": [{"role": "user", "content": "Speak."}, {"role": "assistant", "content": text}]}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config whose every stage has run."""
    file = new_config(tmp_path_factory.mktemp("pipeline"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        assert run("eval-acceptance", file, TRACKED) == 0
    return file


def new_config(root: Path) -> Path:
    """A config and its corpus below `root`; nothing has run."""
    rng = random.Random(0)
    rows = [json.dumps(document(rng, chat=bool(index % 2))) for index in range(60)]
    (root / "rows.jsonl").write_text("\n".join(rows))
    (root / "exp.yaml").write_text(CONFIG.format(root=root, drafts=", ".join(DRAFTS)))
    return root / "exp.yaml"


def run(command: str, *arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main([command, *map(str, arguments)])
    return int(ended.value.code or 0)


def results(config: Path) -> dict[str, dict[str, Any]]:
    return {
        draft: json.loads((config.parent / "runs" / "exp" / "eval" / f"{draft}.json").read_text()) for draft in DRAFTS
    }


def test_greedy_outputs_of_every_draft_equal_plain_decoding_on_every_prompt(config: Path) -> None:
    for draft, document in results(config).items():
        greedy = [entry for entry in document["results"] if entry["temperature"] == 0.0]
        assert {entry["domain"] for entry in greedy} == {"chat", "prose"}
        assert all(entry["identical"] == [2, 2] for entry in greedy), draft


@pytest.mark.long
def test_two_processes_cache_the_bytes_of_one(tmp_path: Path) -> None:
    file = new_config(tmp_path)
    file.write_text(file.read_text().replace("k: 16}", "k: 16, shard_mb: 0.1}"))
    assert run("cache", file) == 0
    folder = tmp_path / "runs" / "exp" / "cache"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(before) > 4
    shutil.rmtree(folder)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "draftsmith"]
    done = subprocess.run([*launch, "cache", str(file)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cache: done") == 1
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_the_oracle_emits_k_plus_one_tokens_per_verify(config: Path) -> None:
    """Sixteen new tokens are four whole verifies of K + 1 = 4, so no last step is cut."""
    greedy = [entry for entry in results(config)["oracle"]["results"] if entry["temperature"] == 0.0]
    assert [entry["tokens_per_verify"]["value"] for entry in greedy] == [4.0, 4.0]


def test_the_result_names_draft_target_and_settings_by_paths_inside_the_run(config: Path) -> None:
    document = results(config)["eagle3"]
    assert document["schema"] == 1
    assert document["draft"]["kind"] == "eagle3"
    assert document["draft"]["path"] == "eagle/eagle3"
    assert document["draft"]["parameters"] > 0
    assert len(document["target"]["fingerprint"]) == 32
    assert document["settings"]["K"] == 3
    assert str(config.parent) not in json.dumps(document)


def test_training_teacher_forcing_and_decoding_agree_on_the_first_drafted_token(config: Path) -> None:
    """FAULTS 59, from the trainer's note to the result: in fp32 to the last position."""
    for draft in ("distilled", "eagle3-no-rollout", "eagle3"):
        checks = results(config)[draft]["depth_one"]
        assert set(checks) == {"held_out", "answers"}
        assert [check["difference"] for check in checks.values()] == pytest.approx([0.0, 0.0], abs=1e-9), draft
    assert set(results(config)["oracle"]["depth_one"]) == {"answers"}
    assert results(config)["prompt-lookup"]["depth_one"] == {}


def test_a_result_is_measured_again_from_its_file_alone(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """FAULTS 61: the run folder may have moved, and the config be gone."""
    run_copy = tmp_path / "elsewhere"
    shutil.copytree(config.parent / "runs" / "exp", run_copy)
    path = run_copy / "eval" / "eagle3.json"
    assert run("eval-acceptance", "--again", path) == 0
    assert "4 results again, acceptance is identical" in capsys.readouterr().out
    document = json.loads(path.read_text())
    document["results"][1]["alpha"]["value"] += 1e-6
    path.write_text(json.dumps(document))
    assert run("eval-acceptance", "--again", path) == 1
    out = capsys.readouterr().out
    assert out.count("DIFFERS: ") == 1
    assert ": alpha is " in out
    path.write_text(json.dumps(document | {"template": None}))
    assert run("eval-acceptance", "--again", path) == 2
    assert "another chat template" in capsys.readouterr().err
    path.write_text(json.dumps(document | {"target": document["target"] | {"fingerprint": "0" * 32}}))
    assert run("eval-acceptance", "--again", path) == 2
    assert run("eval-acceptance", config, "--again", path) == 2
    assert run("eval-acceptance") == 2


def test_thresholds_set_the_exit_code(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FAULTS 60. A result is not worse than itself."""
    assert run("eval-acceptance", config, "--min-alpha", "0.99", "--draft", "oracle") == 0
    assert run("eval-acceptance", config, "--min-alpha", "0.99", "--draft", "untrained") == 3
    assert "MISSED: untrained on " in capsys.readouterr().out
    assert run("eval-acceptance", config, "--baseline", config.parent / "runs" / "exp") == 0


def test_questions_of_a_file_take_the_place_of_held_out_rows_and_known_ones_are_counted(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """FAULTS 11: the question of every training chat, and one of two turns that stands nowhere."""
    root = config.parent / "asked"
    shutil.copytree(config.parent / "runs", root)
    lines: list[dict[str, Any]] = [{"messages": [{"role": "user", "content": "Speak."}]}, {"turns": ["fox", "dog"]}]
    (root / "q.jsonl").write_text("\n".join(map(json.dumps, lines)))
    asked = [f"run_root={root}", "evaluation.drafts=[prompt-lookup]", f"evaluation.questions={root}/q.jsonl"]
    assert run("eval-acceptance", config, *asked) == 0
    assert "warning: 1 of 2 prompts also begin training rows" in capsys.readouterr().out
    document = json.loads((root / "exp" / "eval" / "prompt-lookup.json").read_text())
    assert [(e["domain"], e["prompts"], e["answers"]) for e in document["results"]] == [("questions", 2, 3)] * 2
    assert document["template"]["add_generation_prompt"]
    assert document["prompts"]["questions"][1] == {"messages": [], "turns": ["fox", "dog"]}
    assert run("eval-acceptance", config, *asked) == 0
    assert "eval-acceptance: unchanged, skipped" in capsys.readouterr().out
    (root / "q.jsonl").write_text(json.dumps(lines[0]))
    assert run("eval-acceptance", config, *asked) == 0
    assert len(json.loads((root / "exp" / "eval" / "prompt-lookup.json").read_text())["prompts"]["questions"]) == 1


def test_a_head_in_an_imported_folder_is_measured_without_training_and_exported(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run's own head, through an engine's folder and back: acceptance number for number as it was."""
    root, heads = config.parent / "elsewhere", config.parent / "heads"
    shutil.copytree(config.parent / "runs", root)
    folder = root / "exp"
    assert run("export", folder, "--draft", "eagle3", "--to", "sglang", "--out", heads / "published") == 0
    assert run("import", heads / "published", "--target", folder / "target", "--out", heads / "theirs-1.0") == 0
    shutil.rmtree(folder / "eagle")
    asked = [f"run_root={root}", f"evaluation.drafts=[{heads}/theirs-1.0]"]
    assert run("eval-acceptance", config, *asked) == 0
    assert "train-eagle" not in capsys.readouterr().out
    found = json.loads((folder / "eval" / "theirs-1.0.json").read_text())
    assert found["draft"]["kind"] == "eagle3"
    for entry, own in zip(found["results"], results(config)["eagle3"]["results"], strict=True):
        assert {key: entry.get(key) for key in REPEATABLE} == {key: own.get(key) for key in REPEATABLE}
    assert run("eval-acceptance", "--again", folder / "eval" / "theirs-1.0.json") == 0
    assert run("eval-acceptance", config, *asked) == 0
    assert "eval-acceptance: unchanged, skipped" in capsys.readouterr().out
    assert run("export", folder, "--draft", heads / "theirs-1.0", "--to", "vllm") == 0
    assert "tokens per verify" in (folder / "export" / "vllm" / "theirs-1.0" / "README.md").read_text()
    (heads / "theirs-1.0" / "config.json").unlink()
    assert run("eval-acceptance", config, *asked) == 2
    assert f"evaluation.drafts: {heads}/theirs-1.0: no folder of a draft" in capsys.readouterr().err


def test_a_second_run_skips_every_stage(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("eval-acceptance", config) == 0
    out = capsys.readouterr().out
    assert out.count("unchanged, skipped") == 6
    assert "runs (" not in out


def test_the_report_shows_every_draft_and_every_training_curve(config: Path) -> None:
    folder = config.parent / "runs" / "exp"
    assert run("report", folder) == 0
    page = (folder / "report.html").read_text()
    assert all(draft in page for draft in DRAFTS)
    assert {"training-target.png", "training-drafts.png"} <= {path.name for path in (folder / "plots").iterdir()}


def test_an_offline_wandb_run_holds_every_documented_key_and_no_other(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    _run(_load(config, [TRACKED]), "report")
    files = (config.parent / "runs" / "exp").glob("wandb/offline-run-*/*.wandb")
    names = {name for file in files for name in wandb_values(file) if not name.startswith("_")}
    assert [name for name in sorted(names) if len(list(documented(name))) != 1] == []
    assert {key.name for name in names for key in documented(name)} == {key.name for key in KEYS}


def test_tuning_from_stated_costs_leaves_the_choice_as_json_and_as_a_page(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = "tune.costs=[{batch: 1, target_step_ms: 20, draft_step_ms: 0.5, verify_ms: {8: 22, 16: 26}}]"
    few = ["tune.K=3", "tune.depth=2", "tune.budgets=[7]", "tune.widths=[3]", "tune.temperatures=[0]", "tune.prompts=1"]
    assert run("tune", config, costs, *few) == 0
    folder = config.parent / "runs" / "exp"
    document = json.loads((folder / "tune.json").read_text())
    assert {entry["draft"] for entry in document["families"]} == set(DRAFTS) - {"untrained", "oracle"}
    assert document["costs"]["stated"]
    assert all(entry["tokens_per_verify_error"] == pytest.approx(0) for entry in document["verified"])
    page = (folder / "skill-speculative-tuning.md").read_text()
    out = capsys.readouterr().out
    assert page.splitlines()[7].replace("**", "") in out
    assert run("tune", config, costs, *few) == 0
    assert "tune: unchanged, skipped" in capsys.readouterr().out


def test_the_plan_tells_the_size_of_the_cache_and_the_parameters(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 5 % of the bytes on disk, and the very parameters that the results count."""
    monkeypatch.setenv("COLUMNS", "200")
    assert run("plan", config) == 0
    out = capsys.readouterr().out
    assert "be skipped: unchanged" in out
    said = float(out.split(" rows, ")[1].split(" MB")[0].replace(",", ""))
    stored = sum(path.stat().st_size for path in (config.parent / "runs" / "exp" / "cache").glob("*.safetensors"))
    assert said == pytest.approx(stored / 1e6, rel=0.05, abs=0.05)
    folder = config.parent / "runs" / "exp"
    for draft, log in {
        "distilled": "draft",
        "eagle3-no-rollout": "eagle/eagle3-no-rollout",
        "eagle3": "eagle/eagle3",
    }.items():
        assert f"{results(config)[draft]['draft']['parameters']:,}" in out
        rate = json.loads((folder / log / "training.jsonl").read_text().splitlines()[-1])["tokens_per_second"]
        assert f" at {rate:,.0f} tokens/s" in out  # what its training here reached
    assert run("plan", config, "--train-tokens-per-second", "10", "distill.tokens=600") == 0
    both = capsys.readouterr().out
    assert f" at {rate:,.0f} tokens/s" in both  # a stated rate is of another machine and replaces nothing
    assert "60 seconds at 10 tokens/s" in both
    assert run("plan", config, "--train-tokens-per-second", "inf") == 2
    assert "a stated rate must be a number of tokens/s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ("{width: 64}", "wider than the target"),
        ("{width: 12, states_start: true}", "no start from the states"),
        ("{draft_vocabulary: 10}", "value dimensions need a draft vocabulary"),
    ],
)
def test_the_plan_refuses_a_head_that_the_training_would_refuse_after_the_cache_is_built(
    config: Path, capsys: pytest.CaptureFixture[str], changes: str, said: str
) -> None:
    assert run("plan", config, f"eagle.more={changes}", "cache.last=true") == 2
    assert said in capsys.readouterr().err.replace("\n", " ")


def test_the_plan_of_a_head_that_goes_on_from_another_has_the_shape_of_that_one(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder's vocabulary and sizes, not the target's; and the refusals of the training come before it."""
    folder = config.parent / "runs" / "exp" / "eagle" / "eagle3"
    assert run("plan", config, f"eagle.more={{start: {folder}}}") == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if " more " in line and "run (" not in line)
    assert f" {results(config)['eagle3']['draft']['parameters']:,} " in line
    for change, said in (("kind: eagle1", "holds eagle3, not eagle1"), ("confidence: 1", "no confidence output")):
        given = ["cache.last=true", f"eagle.more={{start: {folder}, {change}}}"]
        assert run("plan", config, *given) == 2
        assert said in capsys.readouterr().err
    assert run("plan", config, "cache.taps=[0, 1]", f"eagle.more={{start: {folder}}}") == 2
    assert "eagle taps: the cache has [0, 1], not 2" in capsys.readouterr().err


def test_changed_cache_settings_are_refused_by_name_and_nothing_is_lost(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("cache", config, "cache.k=8") == 2
    err = capsys.readouterr().err
    assert "k = 16, now it is 8" in err
    assert err.count("\n") == 1
    assert run("cache", config) == 0
    assert "cache: unchanged, skipped" in capsys.readouterr().out


def test_a_prompt_longer_than_the_context_is_one_line_and_exit_code_2(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("eval-acceptance", config, "evaluation.prompt_tokens=500") == 2
    err = capsys.readouterr().err
    assert "evaluation.prompt_tokens" in err
    assert err.count("draftsmith: ") == 1


def test_show_mask_and_the_cache_commands_print_what_is_there(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show-mask", config) == 0
    out = capsys.readouterr().out
    assert "<|user|>Speak.<|end|><|assistant|>⟦" in out
    cache = config.parent / "runs" / "exp" / "cache"
    assert run("cache-info", cache) == 0
    assert "p(x[t+1] |" in capsys.readouterr().out, "brackets in a value are no markup"
    assert run("cache-verify", cache) == 0
    assert "every checksum is right" in capsys.readouterr().out
    shard = next(cache.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert run("cache-verify", cache) == 2
    assert shard.name in capsys.readouterr().err
    content[-1] ^= 1
    whole, damaged = bytes(content), cache.parent / "stages" / "cache.json"
    before = damaged.read_bytes()
    assert run("cache-repair", config) == 0
    assert f"cache-repair: rebuilt {shard.name}: checksum" in capsys.readouterr().out
    assert shard.read_bytes() == whole
    assert damaged.read_bytes() == before, "nothing that was built on the cache becomes stale"
    assert run("cache-repair", config) == 0
    assert "nothing was rebuilt" in capsys.readouterr().out
    with RunFolder(cache.parent).lock():  # another process is at work in the folder
        assert run("cache-repair", config) == 2
    assert "in use by process" in capsys.readouterr().err


def test_both_trainers_run_online_and_nothing_is_written(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = config.parent / "copy"
    shutil.copytree(config.parent / "runs", root)
    shutil.rmtree(root / "exp" / "cache")
    online = [f"run_root={root}", "cache.online=true"]
    assert run("cache-repair", config, *online) == 2
    assert "cache.online" in capsys.readouterr().err
    assert run("plan", config, "--tokens-per-second", "10", *online) == 0
    assert "at 10 tokens/s (stated); online: computed at every use" in " ".join(capsys.readouterr().out.split())
    assert run("distill", config, *online) == 0
    assert "cache: online" in capsys.readouterr().out
    assert run("train-eagle", config, *online, "eagle.eagle3.tokens=300") == 0
    assert not (root / "exp" / "cache").exists()


def test_the_plan_tells_the_time_at_a_stated_or_measured_rate_and_refuses_a_short_disk(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("plan", config, "--measure", "--tokens-per-second", "10") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"at 10 tokens/s \(stated\), .* tokens/s \(measured on one batch here\), [\d.]+ MB", said)
    assert run("plan", new_config(tmp_path), "--measure") == 2
    assert "--measure: the target's weights are not on this machine" in capsys.readouterr().err
    usage = shutil.disk_usage(config.parent)._replace(free=1000)
    monkeypatch.setattr("draftsmith.plan.shutil.disk_usage", lambda _path: usage)
    assert run("plan", config, "cache.k=64", "cache.state_codec=fp32") == 2
    assert "too little; free some space" in capsys.readouterr().err


def test_a_cache_of_another_target_or_of_other_rows_is_made_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, short = new_config(tmp_path), "target.scratch.tokens=500"
    assert run("cache", file, short) == 0
    assert "removed" not in capsys.readouterr().out
    for override, what in (("seed=1", "target"), ("data.train_tokens={prose: 300}", "rows")):
        other = [short, "seed=1", override]
        assert run("cache", file, *other) == 0
        out = capsys.readouterr().out
        assert f"cache: made for other {what}; removed {tmp_path / 'runs' / 'exp' / 'cache'}" in out
        assert run("cache-verify", tmp_path / "runs" / "exp" / "cache") == 0
        assert run("cache", file, *other) == 0
        assert "cache: unchanged, skipped" in capsys.readouterr().out


def test_parameters_are_counted_without_memory_for_them(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []

    def count(module: torch.nn.Module) -> int:
        made.extend(parameter.device for parameter in module.parameters())
        return 0

    monkeypatch.setattr("draftsmith.plan._count", count)
    assert run("plan", config) == 0
    assert {device.type for device in made} == {"meta"}
