"""What all studies share: the journal, what is missing, and that each page in docs/ is what its file of numbers says."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "benchmarks" / "peers"))
import cache_page
import decode_page
import distill_page
import eagle_page
import peers_page
import smollm2_page
import study
from study import Journal, command, do_missing, publish_study, rounded, study_parser, study_text

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = {
    "cache": ("cache", cache_page.page),
    "decode": ("decoding", lambda found: decode_page.page(found["rows"], found["environment"])),
    "distill": ("distillation", distill_page.page),
    "eagle": ("eagle", eagle_page.page),
    "peers": ("peers", peers_page.page),
    "smollm2": ("smollm2", smollm2_page.page),
}


def journal(path):
    return Journal(path, lambda entry: entry["job"])


def work(name, value):
    return {"job": name, "value": value}


def test_what_the_journal_holds_is_not_done_again_and_the_rest_is_noted_in_order(tmp_path):
    path, calls = tmp_path / "study" / "runs.jsonl", []

    def called(name, value):
        calls.append(name)
        return work(name, value)

    do_missing(journal(path), {"b": ("b", 2)}, called, ThreadPoolExecutor(1))
    do_missing(journal(path), {name: (name, 0) for name in "abc"}, called, ThreadPoolExecutor(1))
    assert calls == ["b", "a", "c"]
    found = journal(path).of("abcd")
    assert [(entry["job"], entry["value"]) for entry in found] == [("a", 0), ("b", 2), ("c", 0)]
    assert all(entry["revision"] for entry in found)


def test_a_line_that_a_kill_cut_off_counts_as_not_done_and_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps(work("a", 1)) + "\n" + json.dumps(work("b", 1))[:-3], encoding="utf-8")
    found = journal(path)
    assert list(found.found) == ["a"]
    found.add(work("b", 2))
    found.add(work("c", 2))
    assert journal(path).of("abc") == [work("a", 1), work("b", 2), work("c", 2)]


def test_a_page_is_made_from_the_numbers_that_are_written_down(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "DOCS", tmp_path)
    rows = [{"what": "α", "value": 1 / 3, "count": 123_456_789, "settings": {"sides": ("a", "b")}}] * 2
    publish_study("some", "page", "make some", rows, lambda found: str(found["rows"]))
    written = json.loads((tmp_path / "studies" / "some.json").read_text(encoding="utf-8"))
    assert written["rows"][0]["value"] == 0.33333333
    assert written["rows"][0]["count"] == 123_456_789
    assert (tmp_path / "page.md").read_text() == str(written["rows"])


def test_the_command_of_a_study_names_what_changes_its_numbers_and_nothing_else():
    parser = study_parser("about", "runs/some", tokens=100, seeds=3, workers=2)
    parser.add_argument("--limits", action="store_true")
    parser.add_argument("--K", type=int, nargs="+", default=[3])

    def made(*options: str) -> str:
        return command("some", parser, parser.parse_args(options))

    assert made("--folder", "elsewhere", "--workers", "7", "--tokens", "100") == "make some"
    assert made("--limits", "--seeds", "5", "--K", "3", "5") == 'make some ARGS="--seeds 5 --limits --K 3 5"'
    assert made("/somebody/runs/wide") == "make some RUN=runs/wide"


def test_the_command_of_a_study_holds_no_path_of_the_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parser = study_parser(None, "runs/some", 20, 3, 1)
    parser.add_argument("--foreign", type=Path, nargs="+")
    given = parser.parse_args(
        ["--foreign", f"{tmp_path}/runs/foreign/one", "runs/two", f"{tmp_path.parent}/elsewhere/three"]
    )
    assert command("some", parser, given) == 'make some ARGS="--foreign runs/foreign/one runs/two three"'


@pytest.mark.parametrize("name", PAGES)
def test_each_page_in_docs_is_what_its_study_says(name):
    page, text = PAGES[name]
    found = json.loads((DOCS / "studies" / f"{name}.json").read_text(encoding="utf-8"))
    assert (DOCS / f"{page}.md").read_text(encoding="utf-8") == text(found)
    assert json.loads(study_text(rounded(found))) == rounded(found)
