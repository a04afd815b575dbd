"""The report says what was measured: the verdict first, nothing from outside, nothing unescaped."""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import entry, interval, write

from draftsmith.errors import UserError
from draftsmith.eval.plots import calibration_plots, depth_plots, length_plots, sweep_plots, tokens_plots
from draftsmith.eval.report import build_report, console_tables, load_curves
from draftsmith.eval.results import headline, left_out, load_results, measure
from draftsmith.eval.verdict import exactness, hot_notes, sweep, verdict


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes seconds; what the page says in words does not depend on it."""
    monkeypatch.setattr("draftsmith.eval.report._sections", lambda run, results: [])
    monkeypatch.setattr("draftsmith.eval.report.sweep_plots", lambda results, draft: [])


def first_line(page: str) -> str:
    """The first text that a reader of the page sees."""
    body = page[page.index("<body>") :]
    return next(text.strip() for text in re.split(r"<[^>]*>", body) if text.strip())


def test_the_first_line_is_the_verdict_with_the_measured_numbers(tmp_path: Path, no_plots: None) -> None:
    write(tmp_path, eagle3=[entry("code", 2.42, 1.31), entry("chat", 2.1, 1.22)], distilled=[entry("code", 1.9, 1.5)])
    page = build_report(tmp_path).read_text()
    assert first_line(page) == "1.22 to 1.31× faster than plain decoding."
    assert "eagle3 emits 2.42 tokens per verify on code and 2.10 on chat at T = 0, K = 5." in page


@pytest.mark.parametrize(
    ("code", "chat", "line"),
    [
        (0.7, 0.8, "Slower than plain decoding: 0.70 to 0.80× its speed."),
        (1.3, 0.8, "Slower than plain decoding on chat: 0.80× its speed; 1.30× faster on code."),
        (1.3, 1.01, "1.30× faster than plain decoding on code; no clear gain on chat (1.01×)."),
        (1.01, 1.01, "No clear gain over plain decoding (1.01×)."),
        (0.9, 1.01, "Slower than plain decoding on code: 0.90× its speed; no clear gain on chat (1.01×)."),
    ],
)
def test_slower_than_plain_decoding_is_said_first(
    tmp_path: Path, no_plots: None, code: float, chat: float, line: str
) -> None:
    """FAULTS 62."""
    write(tmp_path, eagle3=[entry("code", 2.4, code), entry("chat", 2.1, chat)])
    assert first_line(build_report(tmp_path).read_text()) == line


def test_what_holds_at_one_temperature_alone_is_said_of_that_one(tmp_path: Path) -> None:
    hot = [entry(domain, 1.2, 0.6, temperature=1.5, identical=None) for domain in ("code", "chat")]
    write(tmp_path, eagle3=[entry("code", 2.4, 1.4), entry("chat", 2.4, 1.2), *hot])
    judged = verdict(load_results(tmp_path))
    assert judged.tone == "slower"
    assert judged.claim == "Slower than plain decoding at T = 1.5: 0.60× its speed; 1.20 to 1.40× faster at T = 0."
    hot[0] = entry("code", 1.2, 1.1, temperature=1.5, identical=None)
    write(tmp_path, eagle3=[entry("code", 2.4, 1.4), entry("chat", 2.4, 1.2), *hot])
    claim = verdict(load_results(tmp_path)).claim
    assert claim.endswith("on chat at T = 1.5: 0.60× its speed; 1.10 to 1.40× faster at T = 0 and on code at T = 1.5.")


def test_a_speed_timed_on_one_prompt_is_never_called_faster(tmp_path: Path) -> None:
    """Its interval is a point, whatever the machine did meanwhile."""
    lucky = {"value": 1.4, "low": 1.4, "high": 1.4, "count": 1}
    write(tmp_path, eagle3=[entry("code", 2.4, speedup=lucky)])
    assert verdict(load_results(tmp_path)).claim == "No clear gain over plain decoding (1.40×)."


def hot_run(folder: Path, gains: dict[str, float | None]) -> Path:
    """A sweep to T = 1.5 with both ways of drafting there; gains: measured speed-up of each."""
    results = [entry("code", 2.4, 1.4), entry("chat", 2.2, 1.3)]
    for drafting, gain in gains.items():
        tokens = 1.9 if drafting == "sampled" else 1.3
        for domain, alpha in (("code", 0.6), ("chat", 0.5)):
            changes = {"temperature": 1.5, "drafting": drafting, "identical": None, "alpha": interval(alpha)}
            results.append(entry(domain, tokens, gain, **changes))
    return write(folder, eagle3=results)


def test_above_temperature_one_the_page_says_what_becomes_of_alpha_and_whether_speculation_pays(
    tmp_path: Path, no_plots: None
) -> None:
    """Sampled and greedy drafting, each by its own numbers."""
    run = hot_run(tmp_path, {"sampled": 1.2, "greedy": 0.8})
    [note] = hot_notes(sweep(load_results(run)))
    assert note == (
        "At T = 1.5 α is 0.50 to 0.60 with sampled drafting and 0.50 to 0.60 with greedy drafting; at T = 0 it was 0.70. Does "
        "speculation still pay? sampled: yes (1.90 tokens per verify, 1.20× the plain speed) and greedy: no (1.30 tokens per "
        "verify, 0.80× the plain speed)."
    )
    page = build_report(run).read_text()
    assert note in page
    assert page.count("<td>greedy</td>") == 2, "T = 0 and T = 1.5"
    assert verdict(load_results(run)).claim == "1.20 to 1.40× faster than plain decoding.", "as one would draft there"


def test_whether_it_pays_is_a_condition_where_nothing_was_timed(tmp_path: Path) -> None:
    [note] = hot_notes(sweep(load_results(hot_run(tmp_path, {"sampled": None}))))
    assert "sampled: if a verify and its drafting take less than 1.90 plain steps" in note


def test_nothing_is_said_of_temperature_where_there_is_one(tmp_path: Path, no_plots: None) -> None:
    write(tmp_path, eagle3=[entry("code", 2.4)])
    assert sweep(load_results(tmp_path)) == []
    assert "<h2>Temperature</h2>" not in build_report(tmp_path).read_text()


def test_the_sample_shows_each_token_with_its_depth_and_escapes_it(tmp_path: Path, no_plots: None) -> None:
    sample = {"prompt": "if a < b:", "pieces": [["<b>", 1], ["x\n", 2], ["&", 0], ["deep", 9]]}
    write(tmp_path, eagle3=[entry("code", 2.4, sample=sample)])
    page = build_report(tmp_path).read_text()
    assert '<span class="prompt">if a &lt; b:</span>' in page
    assert '<span class="d1">&lt;b&gt;</span><span class="d2">x↵\n</span><span class="d0">&amp;</span>' in page
    assert '<span class="d6">deep</span>' in page, "depths beyond the last colour share it"
    assert "3 of 4 tokens were drafted by eagle3" in page


def test_each_panel_shows_the_numbers_that_it_is_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn, read back from the axes: a theory curve at its own α and costs, and the measured marks."""
    from matplotlib.figure import Figure

    def on_axes(name: str, title: str, paint: Any) -> Any:
        axes = Figure().add_subplot()
        paint(axes)
        return name, {line.get_label(): line.get_xydata().tolist() for line in axes.lines}, axes

    monkeypatch.setattr("draftsmith.eval.plots.draw", on_axes)
    bins = [{"confidence": 0.25, "accepted": interval(0.3)}, {"confidence": 0.75, "accepted": interval(0.7)}]
    costs = {"draft_cost": interval(0.1), "verify_cost": interval(1.2), "calibration": bins}
    survival = [interval(value) for value in (0.7, 0.5, 0.3, 0.2, 0.1)]
    write(tmp_path, eagle3=[entry("code", 2.8, 1.5, survival=survival, **costs)])
    results = load_results(tmp_path)
    (_, tokens, _), (_, _, axes) = length_plots(results)
    assert np.array(tokens["code"]) == pytest.approx(
        np.array([[0, 1], [1, 1.7], [2, 2.2], [3, 2.5], [4, 2.7], [5, 2.8]])
    )
    curve = next(line.get_xydata() for line in axes.lines if line.get_linestyle() == "--")
    assert curve[5] == pytest.approx([5, (1 - 0.7**6) / 0.3 / (1.2 + 0.5)])
    assert axes.containers[0].lines[0].get_xydata().tolist() == [[5, 1.5]]
    [(_, _, axes)] = calibration_plots(results)
    assert axes.containers[0].lines[0].get_xydata() == pytest.approx(np.array([[0.25, 0.3], [0.75, 0.7]]))
    panels = sweep_plots(load_results(hot_run(tmp_path, {"sampled": 1.2, "greedy": 0.8})), "eagle3")
    assert [name for name, _, _ in panels] == ["temperature-alpha", "temperature-tokens", "temperature-speedup"]
    lines = {box.get_label(): box.lines[0].get_xydata().tolist() for box in panels[1][2].containers}
    assert lines["code, sampled"] == [[0, 2.4], [1.5, 1.9]]
    assert lines["chat, greedy"] == [[0, 2.2], [1.5, 1.3]]


def test_a_speed_that_was_not_measured_is_called_that(tmp_path: Path) -> None:
    write(tmp_path, eagle3=[entry("code", 2.4)])
    assert "speed against plain decoding was not measured" in verdict(load_results(tmp_path)).text


def test_the_headline_is_the_best_trained_draft_at_the_lowest_temperature_and_never_the_oracle(tmp_path: Path) -> None:
    cold = {"eagle3": [entry("code", 2.4)], "oracle": [entry("code", 6.0)], "distilled": [entry("code", 2.6)]}
    write(tmp_path, **cold)
    warm = [entry("code", 2.4), entry("code", 5.0, temperature=1.0)]
    write(tmp_path, eagle3=warm)
    assert [(result.draft, result.temperature) for result in headline(load_results(tmp_path))] == [("distilled", 0.0)]


def test_an_output_that_differs_from_plain_decoding_raises_an_alarm(tmp_path: Path, no_plots: None) -> None:
    write(tmp_path, eagle3=[entry("code", 2.4, identical=[39, 40]), entry("chat", 2.4)], oracle=[entry("code", 6.0)])
    page = build_report(tmp_path).read_text()
    assert exactness(load_results(tmp_path)) == [("eagle3", 79, 80), ("oracle", 40, 40)]
    assert "Some greedy outputs differ" in page
    assert "identical 79/80" in page
    write(tmp_path, eagle3=[entry("code", 2.4)])
    assert "Some greedy outputs differ" not in build_report(tmp_path).read_text()


EVIL = "<script>alert(1)</script>$x"


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with everything in it, under names that mean harm, and its report over the plots of an older one."""
    run = tmp_path_factory.mktemp("full")
    write(run, eagle3=[entry(EVIL, 2.4), entry(EVIL, 2, temperature=1.0, identical=None)])
    (run / "resolved.yaml").write_text(f"name: {EVIL}\n")
    (run / "environment.json").write_text(json.dumps({"python": EVIL, "packages": {"torch": "2"}}))
    (run / "plots").mkdir()
    (run / "plots" / "depth-gone.png").write_bytes(b"old")
    (run / "eagle" / "eagle3").mkdir(parents=True)
    lines = [json.dumps({"step": step, "loss": 2.0, "expected_acceptance": 0.5}) for step in (1, 2)]
    (run / "eagle" / "eagle3" / "training.jsonl").write_text("\n".join(lines))
    build_report(run)
    return run


def test_the_page_loads_nothing_and_runs_nothing(full: Path) -> None:
    page = (full / "report.html").read_text()
    loaded = re.findall(r"""(?:src|srcset|href)\s*=\s*["']([^"']*)""", page) + re.findall(r"url\(([^)]*)\)", page)
    assert len(loaded) > 10
    assert all(address.startswith(("data:", "#")) for address in loaded), "in the page itself"
    assert "<script" not in page
    assert "@import" not in page


def test_what_comes_from_files_is_escaped_in_words_and_plots(full: Path) -> None:
    page = (full / "report.html").read_text()
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 8
    assert "packages torch" in page


def test_plots_are_written_beside_the_page_and_stale_ones_are_removed(full: Path) -> None:
    found = {path.stem for path in (full / "plots").glob("*.png")}
    domain = "_script_alert_1_script_x"
    assert found == {
        f"depth-{domain}-T0-K5", f"depth-{domain}-T1-K5", "tokens-per-verify-T0-K5", "tokens-per-verify-T1-K5",
        "temperature-alpha", "temperature-tokens", "training-drafts", "training-acceptance",
        "expected-tokens", "expected-speedup",
    }  # fmt: skip


def test_the_same_files_give_the_same_page(full: Path) -> None:
    before = (full / "report.html").read_bytes()
    assert build_report(full).read_bytes() == before


def test_no_domain_or_tree_names_a_file_outside_the_folder_of_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftsmith.eval.plots.draw", lambda name, title, paint: name)
    write(tmp_path, eagle3=[entry("../../x/y", 2.4), entry("code", 2.4, tree="../../z")])
    results = load_results(tmp_path)
    made = [str(name) for name in [*depth_plots(results), *tokens_plots(results)]]
    assert any(name.startswith("depth-.._.._x_y-") for name in made)
    assert not any("/" in name for name in made)


def test_a_half_written_last_line_of_a_training_log_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "training.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    [curve] = load_curves(tmp_path)
    assert (curve.name, curve.steps, curve.loss, curve.acceptance) == ("distilled", (1,), (2.0,), (None,))


def test_what_was_not_measured_is_a_dash_and_never_a_number(tmp_path: Path, no_plots: None) -> None:
    assert measure({}) is None
    assert measure(None) is None
    write(tmp_path, eagle3=[entry("code", 2.4, alpha={}, n_alpha=[{}, {}], identical=None)])
    [result] = load_results(tmp_path)
    assert (result.alpha, result.n_alpha, result.speedup, result.identical) == (None, (), None, None)
    assert "–" in build_report(tmp_path).read_text()
    assert console_tables([result])[0].row_count == 1


@pytest.mark.parametrize("text", ['{"schema": 1}', "[]", "not json", '{"schema": 1, "results": [{"domain": "code"}]}'])
def test_a_file_that_is_no_result_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "mine.json").write_text(text)
    with pytest.raises(UserError, match=r"mine\.json: not a result"):
        load_results(tmp_path)


def test_a_result_of_another_schema_is_refused(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "mine.json").write_text('{"schema": 2, "results": []}')
    with pytest.raises(UserError, match="schema 2"):
        load_results(tmp_path)


def test_a_draft_that_the_config_no_longer_evaluates_is_left_out_and_named(tmp_path: Path) -> None:
    write(tmp_path, eagle3=[entry("code", 2.4)], gone=[entry("code", 9.0)])
    (tmp_path / "eval" / "broken.json").write_text("not json")
    (tmp_path / "resolved.yaml").write_text("evaluation: {drafts: [eagle3]}\n")
    assert {result.draft for result in load_results(tmp_path)} == {"eagle3"}
    assert left_out(tmp_path) == ["broken.json (not in evaluation.drafts)", "gone.json (not in evaluation.drafts)"]


def test_results_of_an_older_target_are_left_out_and_named(tmp_path: Path) -> None:
    write(tmp_path, distilled=[entry("code", 9.0)], eagle3=[entry("code", 2.4)], oracle=[entry("code", 6.0)])
    for seconds, (draft, target) in enumerate((("distilled", "old"), ("eagle3", "new"), ("oracle", "new"))):
        path = tmp_path / "eval" / f"{draft}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"target": {"fingerprint": target}}))
        os.utime(path, (seconds, seconds))
    assert [result.draft for result in load_results(tmp_path)] == ["eagle3", "oracle"]
    assert left_out(tmp_path) == ["distilled.json (of another target)"]


def test_an_output_that_differs_from_plain_decoding_is_said_before_any_speed(tmp_path: Path, no_plots: None) -> None:
    wrong = [entry("code", 1.9, 1.5, identical=[7, 8]), entry("chat", 1.9, 1.5, identical=[7, 8])]
    write(tmp_path, eagle3=[entry("code", 2.4, 1.3)], distilled=wrong, oracle=[entry("code", 6, identical=[39, 40])])
    judged = verdict(load_results(tmp_path))
    assert judged.tone == "inexact"
    assert first_line(build_report(tmp_path).read_text()) == judged.claim
    assert judged.claim == "NOT EXACT: distilled differs from plain decoding on 2 of 16 prompts and oracle on 1 of 40."
    assert judged.detail.startswith("1.30× faster")


def test_a_sampled_output_need_not_equal_plain_greedy_decoding(tmp_path: Path) -> None:
    write(tmp_path, eagle3=[entry("code", 2.4, 1.3), entry("code", 2.0, 1.2, temperature=1.0, identical=[3, 40])])
    assert verdict(load_results(tmp_path)).tone == "faster"
