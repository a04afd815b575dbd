"""The W&B workspace and report of a project, defined here once: the same panels for everybody.

What is shown is plain data over the documented keys of `draftsmith.tracked`, and can be looked at without an account. To make it on
a server needs the extra package `wandb-workspaces`, a network and an account. Panels take their lines by pattern, so that drafts,
domains and temperatures that are measured later show by themselves.
"""

import importlib.util
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from draftsmith.errors import UserError, first_line
from draftsmith.tracked import KEYS

TITLE = "Draftsmith"
WORDS = (
    "What the drafts of this project learn and what they are worth. One command of Draftsmith is one run; the commands of a "
    "run folder are one group. Keys: docs/tracking.md. Metrics: docs/conventions.md."
)


@dataclass(frozen=True)
class Panel:
    """What is drawn of one documented key: "lines" of every name that it stands for, "media" (pictures, pages) or a "table"."""

    kind: str
    title: str
    key: str

    @property
    def pattern(self) -> str:
        """A regular expression of the names that the panel shows."""
        return next(key.pattern for key in KEYS if key.name == self.key)


@dataclass(frozen=True)
class Section:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


PLACE = "eval/<draft>/<domain>/<at>"
SECTIONS = (
    Section(
        "Training",
        (
            Panel("lines", "Loss", "<stage>/loss"),
            Panel("lines", "Expected acceptance", "<stage>/expected_acceptance"),
            Panel("lines", "Expected acceptance by position", "<stage>/expected_acceptance/<k>"),
            Panel("lines", "Held-out run length", "<stage>/held_out_run_length"),
        ),
    ),
    Section(
        "Evaluation",
        (
            Panel("lines", "α by draft, domain and temperature", f"{PLACE}/alpha"),
            Panel("lines", "Tokens per verify", f"{PLACE}/tokens_per_verify"),
            Panel("lines", "Speed-up over plain decoding", f"{PLACE}/speedup"),
            Panel("lines", "Share identical to plain decoding, T = 0", f"{PLACE}/identical"),
            Panel("media", "n_alpha by draft and position", "eval/n_alpha_heat_map"),
            Panel("table", "All results", "eval/results"),
            Panel("media", "Report", "eval/report"),
        ),
    ),
    Section(
        "Machine",
        (
            Panel("lines", "Throughput, tokens per second", "<stage>/tokens_per_second"),
            Panel("lines", "Memory, GB", "<stage>/memory_gb"),
            Panel("lines", "Share of time waiting for rows", "<stage>/data_wait"),
        ),
    ),
)


def place_of(run_or_project: str) -> tuple[str | None, str]:
    """(entity, project) of `entity/project`, `project`, or a run folder, whose settings name the project. Raises UserError."""
    resolved = Path(run_or_project) / "resolved.yaml"
    if resolved.is_file():
        try:
            project = yaml.safe_load(resolved.read_text(encoding="utf-8"))["tracking"]["project"]
        except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError) as problem:
            raise UserError(
                f"{resolved}: not readable as a run's settings; run a stage of it to make it anew"
            ) from problem
        return os.environ.get("WANDB_ENTITY"), str(project)
    if Path(run_or_project).is_dir():
        raise UserError(f"{run_or_project}: no run folder (it has no resolved.yaml); give one, or entity/project")
    entity, slash, project = run_or_project.rpartition("/")
    if not re.fullmatch(r"[\w.-]+", project) or not re.fullmatch(r"[\w.-]*", entity) or (slash and not entity):
        raise UserError(
            f"{run_or_project!r}: neither a run folder nor a W&B project; give runs/NAME, project or entity/project"
        )
    return entity or os.environ.get("WANDB_ENTITY"), project


def definition(entity: str | None, project: str) -> dict[str, Any]:
    """Workspace and report as JSON, with the names that each panel matches."""
    sections = [
        {
            "title": section.title,
            "panels": [
                {"kind": panel.kind, "title": panel.title, "key": panel.key, "pattern": panel.pattern}
                for panel in section.panels
            ],
        }
        for section in SECTIONS
    ]
    about = {"title": TITLE, "description": WORDS, "entity": entity, "project": project}
    return about | {"sections": sections}


def _panels(panels: Sequence[Panel]) -> list[Any]:
    """Panels as objects of `wandb-workspaces`, two to a row of the grid's 24 columns."""
    import wandb_workspaces.reports.v2 as wr

    made = []
    for number, panel in enumerate(panels):
        layout = wr.Layout(x=12 * (number % 2), y=8 * (number // 2), w=12, h=8)
        if panel.kind == "lines":
            made.append(wr.LinePlot(title=panel.title, layout=layout, metric_regex=panel.pattern))
        elif panel.kind == "media":
            made.append(wr.MediaBrowser(title=panel.title, layout=layout, media_keys=[panel.key]))
        else:
            made.append(wr.WeavePanelSummaryTable(table_name=panel.key, layout=layout))
    return made


def build(entity: str, project: str) -> tuple[Any, Any]:
    """The workspace and the report, not yet saved. Needs the package and no network."""
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    sections = [ws.Section(name=s.title, panels=_panels(s.panels), is_open=True) for s in SECTIONS]
    workspace = ws.Workspace(entity=entity, project=project, name=TITLE, sections=sections)
    blocks: list[Any] = [wr.P(WORDS)]
    for section in SECTIONS:
        runs = wr.Runset(entity=entity, project=project)
        blocks += [wr.H2(section.title), wr.PanelGrid(runsets=[runs], panels=_panels(section.panels))]
    return workspace, wr.Report(entity=entity, project=project, title=TITLE, description=WORDS, blocks=blocks)


def write_definition(run_or_project: str, file: Path) -> None:
    """What would be made, as JSON in `file`."""
    file.write_text(
        json.dumps(definition(*place_of(run_or_project)), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def make_dashboards(run_or_project: str) -> list[str]:
    """Make both on the server; returns their addresses. Raises UserError without package, account or network."""
    entity, project = place_of(run_or_project)
    if importlib.util.find_spec("wandb_workspaces") is None:
        raise UserError(
            "wandb-workspaces is not installed; pip install 'draftsmith[dashboards]', or use --dry-run FILE"
        )
    import wandb

    try:
        account = wandb.Api()  # fails without one
        entity = entity or account.default_entity
        if not entity:
            raise UserError(f"{run_or_project}: no W&B entity is known; give entity/{project}, or set WANDB_ENTITY")
        workspace, report = build(entity, project)
        workspace.save()
        report.save()
    except (wandb.Error, OSError, ValueError) as problem:  # no key, no server, a project that is not there
        raise UserError(
            f"W&B refused ({first_line(problem)}); log in with `wandb login`, or use --dry-run FILE"
        ) from problem
    return [str(workspace.url), str(report.url)]
