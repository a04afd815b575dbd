"""The report in a real browser: telephone and desk, light and dark, without scripts. And that each check can fail."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, Seen, browser, installed
from pages import entry, interval, write

from draftsmith.eval.report import build_report

pytestmark = pytest.mark.skipif(installed() is None, reason="needs Chromium: apt-get install chromium")
LONG = "a_name_without_a_single_place_to_break_it_" * 4


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    command = installed()
    assert command is not None
    with browser(command, tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with everything that one may hold, and with words that are as wide as they come."""
    run = tmp_path_factory.mktemp("a-run")
    pieces = [["def ", 1], [LONG, 2], ["\n    ", 0], ["return", 1], [" é", 6]]
    extra = {
        "sample": {"prompt": f"import os\n{LONG}", "pieces": pieces},
        "survival": [interval(0.7 - 0.1 * k) for k in range(5)],
        "draft_cost": interval(0.1),
        "verify_cost": interval(1.2),
        "calibration": [{"confidence": 0.1 + 0.2 * k, "accepted": interval(0.1 + 0.2 * k)} for k in range(5)],
    }
    results = [entry(domain, 2.4, 1.3, **extra) for domain in ("code", LONG)]
    for drafting in ("sampled", "greedy"):
        hot = {"temperature": 1.5, "identical": None, "drafting": drafting}
        results += [entry(domain, 1.5, 0.8, **hot) for domain in ("code", LONG)]
    write(run, eagle3=results, distilled=results)
    (run / "resolved.yaml").write_text(f"seed: 0\nname: {LONG}\n")
    (run / "environment.json").write_text(json.dumps({"python": "3.11", "system": LONG}))
    (run / "draft").mkdir()
    lines = [json.dumps({"step": k, "loss": 2.0 - k / 50, "expected_acceptance": k / 50}) for k in range(1, 40)]
    (run / "draft" / "training.jsonl").write_text("\n".join(lines))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as a panel whose words leave its axes no room
        return build_report(run)


def faults(seen: Seen) -> list[str]:
    """What is wrong with a page as a browser saw it."""
    wide = [f"{seen.width} pixels in a window of {seen.room}"] if seen.width > seen.room else []
    return wide + seen.problems + seen.requests


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize(("scheme", "ground"), [("light", "rgb(251, 251, 249)"), ("dark", "rgb(19, 22, 28)")])
def test_the_page_fits_says_nothing_to_the_console_and_asks_for_nothing(
    chromium: Browser, page: Path, tmp_path: Path, width: int, scheme: str, ground: str
) -> None:
    seen = chromium.see(page, width, scheme)
    (tmp_path / f"{width}-{scheme}.png").write_bytes(seen.png)
    assert seen.png.startswith(b"\x89PNG")
    assert faults(seen) == []
    assert seen.room == width
    assert seen.background == ground


def test_the_page_is_whole_without_scripts_and_on_paper(chromium: Browser, page: Path) -> None:
    with_scripts = chromium.see(page, 1280)
    without = chromium.see(page, 1280, scripts=False)
    assert faults(without) == []
    assert without.text == with_scripts.text
    assert without.text.startswith("Slower than plain decoding at T = 1.5: 0.80× its speed; 1.30× faster at T = 0.")
    printed = chromium.see(page, 794, scheme="dark", media="print")  # A4
    assert printed.background == "rgb(255, 255, 255)", "ink on white, whatever the screen's scheme is"
    assert faults(printed) == []


@pytest.mark.parametrize(
    ("planted", "fault"),
    [
        ("<div style='width: 900px'>wide</div>", "900 pixels in a window of 390"),
        ("<img src='http://127.0.0.1:9/pixel.png'>", "http://127.0.0.1:9/pixel.png"),
        ("<script>console.error('a script failed')</script>", "a script failed"),
    ],
)
def test_a_planted_fault_is_seen(chromium: Browser, tmp_path: Path, planted: str, fault: str) -> None:
    file = tmp_path / "page.html"
    head = '<!doctype html><meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
    file.write_text(f"{head}<body style='margin: 0'>{planted}")
    assert any(fault in found for found in faults(chromium.see(file, 390)))
    file.write_text(f"{head}<body>nothing wrong")
    assert faults(chromium.see(file, 390)) == []
