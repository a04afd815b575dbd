"""Outcomes of `make chaos` as a study and as the table of docs/reliability.md. Knows lines of chaos.jsonl alone."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from draftsmith.files import publish_json

sys.path.insert(0, str(Path(__file__).parent))
import markdown

KINDS = ("kill", "terminate", "truncate", "flip", "full disk", "tracker", "dead rank", "slow disk")
MAY_STOP = ("truncate", "flip", "full disk", "dead rank")  # the user has to know of these
Fault = dict[str, Any]


def study_rows(faults: list[Fault], wanted: int) -> list[dict[str, Any]]:
    """Per kind how many survived, beside the other counts; then the two totals that are goals of their own."""
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        of = [fault for fault in faults if fault["kind"] == kind]
        counts = Counter(fault["outcome"] for fault in of)
        good = counts["survived"] + counts["stopped"] * (kind in MAY_STOP)
        goal = "survived + stopped cleanly = count" if kind in MAY_STOP else "survived = count"
        rows.append(
            {
                "what": kind,
                "value": counts["survived"],
                "count": len(of),
                "stopped": counts["stopped"],
                "failed": counts["failed"],
                "stages": dict(sorted(Counter(fault["stage"] for fault in of).items())),
                "goal": goal,
                "met": good == len(of) > 0,
            }
        )
    good = sum(fault["outcome"] in ("survived", "stopped") for fault in faults)
    lost = sum(bool(fault["lost"]) for fault in faults)
    rows.append(
        {
            "what": "survived or stopped cleanly",
            "value": good,
            "count": len(faults),
            "goal": f"= {wanted}",
            "met": good == wanted,
        }
    )
    rows.append({"what": "data lost", "value": lost, "count": len(faults), "goal": "= 0", "met": lost == 0})
    return rows


def table(faults: list[Fault]) -> str:
    """Outcomes counted by kind, as Markdown."""
    lines = []
    for kind in (*KINDS, "all"):
        of = Counter(fault["outcome"] for fault in faults if kind in (fault["kind"], "all"))
        lines.append((kind, *map(str, (of.total(), of["survived"], of["stopped"], of["failed"]))))
    return markdown.table(("fault", "injected", "survived", "stopped cleanly", "failed"), lines)


def section(faults: list[Fault], wanted: int, disk: str) -> str:
    """What stands between the marks of the page."""
    stages = Counter(fault["stage"] for fault in faults)
    lost = sum(bool(fault["lost"]) for fault in faults)
    where = ", ".join(f"{name} {count}" for name, count in stages.most_common())
    ran = f"{len(faults)} faults" if len(faults) >= wanted else f"{len(faults)} of {wanted} faults have run so far"
    return f"{ran}; data lost in {lost}. By stage: {where}. Full disk: {disk}.\n\n{table(faults)}"


def write_study(faults: list[Fault], wanted: int, disk: str, environment: dict[str, Any], docs: Path) -> None:
    """`studies/chaos.json`, and the part between the marks of `reliability.md`."""
    study = {"environment": environment, "command": "make chaos", "full disk": disk}
    publish_json(docs / "studies" / "chaos.json", study | {"rows": study_rows(faults, wanted)})
    markdown.fill(docs / "reliability.md", "chaos", section(faults, wanted, disk))
