"""Thresholds, baselines and contradictions of an evaluation, on results made by hand; what they exit with."""

import json
from importlib import resources
from pathlib import Path

import pytest

from draftsmith.cli import main
from draftsmith.errors import UserError
from draftsmith.eval.decode import Verify
from draftsmith.eval.metrics import metrics
from draftsmith.evaluate import Gates, again, contradictions, judge, trained_match

K = 4


def step(accepted):
    hits = (True,) * accepted + ((False,) if accepted < K else ())
    return Verify(K, accepted, accepted + 1, tuple(map(float, hits)), hits)


def entry(accepted, **changes):
    about = {
        "domain": "code",
        "temperature": 0.0,
        "drafting": "greedy",
        "K": K,
        "tree": "chain",
        "prompts": len(accepted),
    }
    speed = {"value": 0.9, "low": 0.8, "high": 1.0, "count": 4}
    return about | metrics([[step(a) for a in own] for own in accepted], K) | {"speedup": speed} | changes


def written(run, draft, accepted, depth_one=None, **changes):
    document = {
        "schema": 1,
        "target": {"fingerprint": "f"},
        "prompts": {"code": [str(i) for i in range(len(accepted))]},
        "results": [entry(accepted, **changes)],
        "depth_one": depth_one or {},
    }
    (run / "eval").mkdir(parents=True, exist_ok=True)
    (run / "eval" / f"{draft}.json").write_text(json.dumps(document))
    return run


def judged(run, **gates):
    lines = []
    return judge(run, Gates(**gates), lines.append), lines


WEAK, GOOD = [[1, 0, 2]] * 6, [[3, 2, 4]] * 6  # 2 and 4 tokens per verify


def test_a_weak_draft_misses_its_threshold_and_a_good_one_does_not(tmp_path):
    """FAULTS 60."""
    run = written(tmp_path, "eagle3", WEAK)
    missed, lines = judged(run, min_tokens_per_verify=2.1)
    assert missed
    assert lines == ["MISSED: eagle3 on code at T = 0: tokens_per_verify 2.000 (2.000 to 2.000) is below 2.1"]
    assert judged(run, min_tokens_per_verify=2.0) == (False, [])
    assert judged(run) == (False, [])
    assert judged(run, min_alpha=0.7)[0]
    assert judged(run, min_speedup=1.0)[0]
    assert judged(written(tmp_path, "eagle3", GOOD), min_tokens_per_verify=2.1, min_alpha=0.7) == (False, [])


def test_what_was_not_measured_does_not_pass(tmp_path):
    missed, [line] = judged(written(tmp_path, "eagle3", GOOD, speedup={}), min_speedup=0.5)
    assert missed
    assert "speedup was not measured" in line


def test_only_what_has_learnt_is_judged_unless_a_draft_is_named(tmp_path):
    run = written(written(tmp_path, "eagle3", GOOD), "untrained", WEAK)
    assert judged(run, min_tokens_per_verify=2.1) == (False, [])
    assert judged(run, min_tokens_per_verify=2.1, drafts=["untrained"])[0]
    with pytest.raises(UserError, match="--draft eagle: not evaluated by this config; there are eagle3, untrained"):
        judged(run, drafts=["eagle"])


def test_a_baseline_that_was_better_is_missed_whether_named_by_file_or_by_run(tmp_path):
    before, now = written(tmp_path / "before", "eagle3", GOOD), written(tmp_path / "now", "eagle3", WEAK)
    for baseline in (before, before / "eval" / "eagle3.json"):
        missed, lines = judged(now, baseline=baseline)
        assert missed
        assert sum(line.startswith("MISSED: ") for line in lines) == 2, "tokens per verify and alpha"
        assert "4.000 → 2.000, difference -2.000 (-2.000 to -2.000, paired)" in lines[0]
    missed, lines = judged(before, baseline=now)
    assert (missed, len(lines)) == (False, 2), "a gain is printed and is no loss"
    with pytest.raises(UserError, match="no result of eagle3"):
        judged(now, baseline=tmp_path)
    with pytest.raises(UserError, match="not a result of eval-acceptance"):
        judged(now, baseline=tmp_path / "none.json")


def test_a_contradiction_is_a_fault_and_comes_with_its_checklist(tmp_path):
    check = {"trained": 0.71, "teacher_forced": 0.32, "difference": -0.39, "positions": 900, "ok": False}
    lines: list[str] = []
    assert contradictions(written(tmp_path, "eagle3", GOOD, {"held_out": check}), lines.append)
    assert lines[0] == (
        "CONTRADICTION: eagle3: the first drafted token matches in 0.710 trained and 0.320 teacher_forced of the same 900 tokens "
        "of held_out; check:"
    )
    assert any("one layer off" in line for line in lines[1:])
    assert not contradictions(written(tmp_path, "eagle3", GOOD, {"held_out": check | {"ok": True}}), lines.append)


def test_the_match_that_training_noted_is_that_of_the_weights_kept_last(tmp_path):
    assert trained_match(tmp_path) is None
    lines = [
        {"step": 1, "loss": 1.0},
        {"step": 5, "best_match": 0.4},
        {"step": 9, "best_match": 0.6},
        {"step": 10, "loss": 0.5},
    ]
    (tmp_path / "training.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert trained_match(tmp_path) == 0.6
    (tmp_path / "training.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    assert trained_match(tmp_path) is None, "of an older version"


def test_a_result_without_prompts_cannot_be_measured_again(tmp_path):
    path = written(tmp_path, "eagle3", GOOD) / "eval" / "eagle3.json"
    with pytest.raises(UserError, match="did not keep all that a second run needs; evaluate again"):
        again(path, print)


def test_a_draft_that_is_to_be_judged_and_is_not_evaluated_is_refused_before_anything_runs(tmp_path, capsys):
    config = Path(str(resources.files("draftsmith.configs"))) / "demo-tiny.yaml"
    with pytest.raises(SystemExit) as end:
        main(["eval-acceptance", str(config), f"run_root={tmp_path / 'runs'}", "--draft", "nobody"])
    assert end.value.code == 2
    assert "--draft nobody: not evaluated by this config" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
