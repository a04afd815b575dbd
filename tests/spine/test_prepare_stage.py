"""The stage `prepare`: an identical run is a hit, and whatever changes the rows makes them again (FAULTS 7)."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from kit import tiny_target_folder

from draftsmith.config import load_config
from draftsmith.data.rows import Rows
from draftsmith.run import RunFolder, execute, needed
from draftsmith.stages import stage_units
from draftsmith.work import Work

CONFIG = """
run_root: {root}/runs
target: {{path: {target}}}
data: {{sources: [{{kind: {kind}, path: {root}/{path}}}], max_length: 64, held_out: 0.3}}
tracking: {{trackers: []}}
"""
BOTH = ["target", "prepare"]


class Bench:
    """Forty conversations and a tiny target in a folder."""

    def __init__(self, root: Path, kind: str = "json", path: str = "data/rows.jsonl") -> None:
        self.root, self.target = root, tiny_target_folder(root)
        self.said: list[str] = []
        self.write("answer")
        (root / "exp.yaml").write_text(CONFIG.format(root=root, target=self.target, kind=kind, path=path))

    def write(self, word: str) -> None:
        (self.root / "data").mkdir(exist_ok=True)
        with (self.root / "data" / "rows.jsonl").open("w") as lines:
            for i in range(40):
                answer = {"role": "assistant", "content": f"{word} {i}"}
                lines.write(json.dumps({"messages": [{"role": "user", "content": f"q{i}"}, answer]}) + "\n")

    def prepare(self, *overrides: str) -> list[str]:
        """Keys of the units that ran."""
        config = load_config(self.root / "exp.yaml", overrides).config
        self.rows = config.run / "rows"
        units = needed(stage_units(config, Work(config, self.said.append)), "prepare")
        return execute(units, RunFolder(config.run), self.said.append)

    def digest(self) -> str:
        return Rows.open(self.rows, "train").digest


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    made = Bench(tmp_path)
    assert made.prepare() == BOTH
    return made


def test_an_identical_run_is_a_hit(bench: Bench) -> None:
    assert bench.prepare() == []
    assert bench.prepare("data.workers=2") == []
    os.utime(bench.root / "data" / "rows.jsonl", (0, 0))  # another time and the same content
    assert bench.prepare() == []


def same_size_and_time(bench: Bench) -> None:
    file = bench.root / "data" / "rows.jsonl"
    before = file.stat()
    bench.write("ANSWER")
    assert file.stat().st_size == before.st_size
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def template(bench: Bench) -> None:
    file = bench.target / "chat_template.jinja"
    file.write_text(file.read_text().replace("<|assistant|>", "<|assistant|>:"))


def tokenizer(bench: Bench) -> None:
    file = bench.target / "tokenizer.json"
    rules = json.loads(file.read_text())
    rules["model"]["merges"] = []
    file.write_text(json.dumps(rules))


def damaged_rows(bench: Bench) -> None:
    (bench.rows / "train" / "supervised.npy").unlink()


@pytest.mark.parametrize(
    ("change", "runs", "other_rows"),
    [
        (same_size_and_time, ["prepare"], True),
        (template, BOTH, True),
        (tokenizer, BOTH, True),
        (damaged_rows, ["prepare"], False),
    ],
)
def test_another_text_template_or_tokenizer_makes_other_rows(
    bench: Bench, change: Callable[[Bench], None], runs: list[str], other_rows: bool
) -> None:
    before = bench.digest()
    change(bench)
    assert bench.prepare() == runs
    assert (bench.digest() != before) == other_rows
    assert bench.prepare() == []


@pytest.mark.parametrize("override", ["data.max_length=12", "data.held_out=0.5", "data.train_tokens={chat: 90}"])
def test_another_setting_of_the_data_makes_other_rows(bench: Bench, override: str) -> None:
    before = bench.digest()
    assert bench.prepare(override) == ["prepare"]
    assert bench.digest() != before


def test_a_local_folder_that_load_dataset_reads_is_known_by_its_content(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "hub", "data")
    assert bench.prepare() == BOTH
    assert bench.prepare() == []
    before = bench.digest()
    bench.write("other")
    assert bench.prepare() == ["prepare"]
    assert bench.digest() != before


def test_what_was_dropped_and_what_is_no_stranger_is_said_in_lines(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with (tmp_path / "data" / "rows.jsonl").open("a") as lines:
        lines.write('{"question": "?"}\n{"te\n{"messages": []}\n')
        for i in range(30):
            answer = {"role": "assistant", "content": str(i)}
            lines.write(json.dumps({"messages": [{"role": "user", "content": "same"}, answer]}) + "\n")
    bench.prepare()
    said = "\n".join(bench.said)
    assert "prepare: 1 of 73 dropped: not JSON, first rows.jsonl:42: not JSON" in said
    assert (
        "prepare: 1 of 73 dropped: unknown schema, first rows.jsonl:41: unknown schema with fields ['question']" in said
    )
    repeated = json.loads((bench.rows / "summary.json").read_text())["contamination"]["repeated"]
    assert 3 < repeated < 25
    assert f"prepare: warning: {repeated} of " in said
