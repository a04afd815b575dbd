"""The documented names: docs/tracking.md holds them, dashboards use no other, and a result's numbers are logged under them."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from pages import entry, interval

from draftsmith.cli import main
from draftsmith.dashboards import SECTIONS, definition, place_of
from draftsmith.errors import UserError
from draftsmith.tracked import KEYS, at, documented, evaluation_values, table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tracking.md"


def test_the_page_holds_the_table_of_keys() -> None:
    assert table() in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("target/loss", "<stage>/loss"),
        ("eagle3-no-rollout/expected_acceptance/4", "<stage>/expected_acceptance/<k>"),
        ("eval/eagle3/my_code.v2/T1.5-greedy/n_alpha/0", "eval/<draft>/<domain>/<at>/n_alpha/<k>"),
        ("eval/results", "eval/results"),
        ("eagle3/loss/0", None),
        ("eval/eagle3/code/T0/beta", None),
    ],
)
def test_a_name_is_of_one_key_or_of_none(name: str, key: str | None) -> None:
    assert [found.name for found in documented(name)] == ([] if key is None else [key])


def test_every_number_of_a_result_has_a_documented_name() -> None:
    about = {"temperature": 1.5, "drafting": "greedy", "acceptance_rate": interval(0.4), "n_alpha": [interval(0.7), {}]}
    values = evaluation_values("eagle3", entry("my code", 2.4, identical=[39, 40], **about))
    place = "eval/eagle3/my_code/T1.5-greedy"
    assert values == {
        f"{place}/alpha": 0.7,
        f"{place}/acceptance_rate": 0.4,
        f"{place}/tokens_per_verify": 2.4,
        f"{place}/n_alpha/0": 0.7,
        f"{place}/identical": 39 / 40,
    }
    assert all(len(list(documented(name))) == 1 for name in values)
    assert at(0.0, "greedy") == "T0"


def test_every_panel_shows_a_documented_key_in_a_way_that_fits_it() -> None:
    panels = [panel for section in SECTIONS for panel in section.panels]
    kinds = {key.name: key.kind for key in KEYS}
    fitting = {"lines": {"number"}, "media": {"image", "page"}, "table": {"table"}}
    assert [panel.title for panel in panels if kinds.get(panel.key) not in fitting[panel.kind]] == []
    shown = {panel.key.rsplit("/", 1)[-1] for panel in panels}
    wanted = {"loss", "expected_acceptance", "alpha", "tokens_per_verify", "n_alpha_heat_map"}
    assert wanted | {"tokens_per_second", "memory_gb"} <= shown


def test_the_definition_is_written_without_a_network_and_names_what_each_panel_matches(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["dashboards", "my-team/drafts", "--dry-run", str(tmp_path / "panels.json")])
    assert not ended.value.code
    made = json.loads((tmp_path / "panels.json").read_text())
    assert (made["entity"], made["project"]) == ("my-team", "drafts")
    patterns = {panel["key"]: panel["pattern"] for section in made["sections"] for panel in section["panels"]}
    assert re.match(patterns["<stage>/loss"], "eagle3/loss")
    assert not re.match(patterns["<stage>/loss"], "eval/eagle3/code/T0/alpha")
    assert re.match(patterns["eval/<draft>/<domain>/<at>/alpha"], "eval/eagle3/code/T0/alpha")


def test_a_run_folder_names_its_project_and_what_is_neither_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_ENTITY", raising=False)
    (tmp_path / "resolved.yaml").write_text("tracking: {project: mine}\n")
    assert place_of(str(tmp_path)) == (None, "mine")
    assert place_of("team/project") == ("team", "project")
    (tmp_path / "empty").mkdir()
    for wrong in (str(tmp_path / "empty"), "a/b/c", "/project", "two words"):
        with pytest.raises(UserError, match="run folder"):
            place_of(wrong)


@pytest.mark.skipif(importlib.util.find_spec("wandb_workspaces") is None, reason="needs wandb-workspaces")
def test_the_workspace_is_built_with_the_patterns_of_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    from draftsmith.dashboards import build, make_dashboards

    workspace, report = build("team", "draftsmith")
    built = json.dumps(workspace._to_model().model_dump(mode="json", by_alias=True))
    for section in definition("team", "draftsmith")["sections"]:
        for panel in section["panels"]:
            named = panel["pattern"] if panel["kind"] == "lines" else panel["key"]
            assert json.dumps(named)[1:-1] in built
    assert len(report.blocks) == 1 + 2 * len(SECTIONS)
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", "/dev/null")
    with pytest.raises(UserError, match="wandb login"):
        make_dashboards("team/draftsmith")
