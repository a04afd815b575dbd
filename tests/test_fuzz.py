"""Whatever a user's file holds: it is read, or refused in one line. No traceback, no hang, no file outside its folder."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit import a_head, tiny_rows, tiny_target

from draftsmith.config import load_config
from draftsmith.data.cache.build import build_cache
from draftsmith.data.cache.manifest import CacheSettings
from draftsmith.data.cache.reader import CacheReader
from draftsmith.data.corpus import DataSettings, load_documents
from draftsmith.data.rows import Rows
from draftsmith.errors import UserError
from draftsmith.eval import report
from draftsmith.eval.prompts import Writer, read_questions
from draftsmith.eval.results import load_results
from draftsmith.eval.settings import EvalSettings
from draftsmith.models.eagle import EagleHead
from draftsmith.models.serving.export import export_draft
from draftsmith.models.serving.importing import import_draft
from draftsmith.run import RunFolder, Unit
from draftsmith.train.checkpoint import Checkpoints

quick = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.sampled_from(["../../x", "/x", "\0"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def refused_or_read(act: Callable[[], Any]) -> None:
    """A UserError of one line, or a result."""
    said = "read"
    try:
        act()
    except UserError as error:
        said = str(error)
    assert said.strip()
    assert "\n" not in said


def around(folder: Path) -> set[str]:
    """What lies in the folders above, where nothing may appear."""
    return {path.name for path in folder.parent.iterdir()} | {path.name for path in folder.parent.parent.iterdir()}


@cache
def known(kind: str) -> dict[str, bytes]:
    """The files of a small valid cache, head, rows, result or checkpoint, by their relative paths."""
    with TemporaryDirectory() as name:
        folder, target = Path(name), the_target()
        place = folder / kind
        if kind in ("cache", "rows"):
            rows = tiny_rows(folder, [9, 12, 7])
            if kind == "cache":
                build_cache(target, rows, place, CacheSettings(distribution="topk", k=4))
        elif kind == "run":
            write_run(place)
        elif kind == "head":
            a_head(target).save(place)
        elif kind == "imported head":
            a_head(target).save(folder / "own")
            export_draft(folder / "own", target, "speculators", place)
        elif kind == "checkpoints":
            import torch

            parts = {name: {"w": torch.ones(2)} for name in ("weights", "optimizer", "random")}
            Checkpoints(place).save(3, parts, {"position": {}})
        return {path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*") if path.is_file()}


@cache
def the_target() -> Any:
    return tiny_target()


def damaged(data: st.DataObject, content: bytes, suffix: str) -> bytes:
    """The content cut, flipped, replaced, or with one JSON value changed."""
    ways = ["cut", "flip", "replace"] + (["value"] * 3 if suffix == ".json" else [])
    way = data.draw(st.sampled_from(ways))
    if way == "cut":
        return content[: data.draw(st.integers(0, len(content) - 1))]
    if way == "replace":
        return data.draw(st.binary(max_size=60))
    if way == "value":
        document = json.loads(content)
        holder: Any = document
        while isinstance(holder, dict | list) and holder:
            key = data.draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
            if not isinstance(holder[key], dict | list) or not holder[key] or data.draw(st.booleans()):
                holder[key] = data.draw(VALUES)
                break
            holder = holder[key]
        return json.dumps(document).encode()
    place = data.draw(st.integers(0, min(len(content), 2000) - 1))
    return content[:place] + bytes([content[place] ^ 1 << data.draw(st.integers(0, 7))]) + content[place + 1 :]


def read_cache(folder: Path) -> None:
    reader = CacheReader(folder, the_target().fingerprint())
    if not reader.verify():
        reader.batch(range(len(reader)))


def interval(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.1, "high": value + 0.1, "count": 9}


def write_run(place: Path) -> None:
    """All files of a run folder that a report reads, as small as they come."""
    entry = {
        "domain": "code",
        "temperature": 0.0,
        "K": 3,
        "tree": "chain",
        "prompts": 2,
        "verifies": 9,
        "identical": [2, 2],
    }
    measured = {
        "alpha": interval(0.7),
        "tokens_per_verify": interval(2.1),
        "n_alpha": [interval(0.7)],
        "speedup": interval(1.2),
    }
    result = {"schema": 1, "draft": {"parameters": 5}, "target": {"fingerprint": "x"}, "results": [entry | measured]}
    done = {
        "unit": "cache",
        "version": "0",
        "settings": {},
        "inputs": {"target": "x"},
        "id": "y",
        "outputs": {"cache": "1"},
    }
    for name, value in (("eval/eagle3", result), ("environment", {"packages": {"torch": "2"}}), ("stages/cache", done)):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / f"{name}.json").write_text(json.dumps(value))
    (place / "resolved.yaml").write_text("seed: 0\nevaluation: {drafts: [eagle3]}\n")
    (place / "draft").mkdir()
    (place / "draft" / "training.jsonl").write_text('{"step": 1, "loss": 2.0, "expected_acceptance": 0.4}\n' * 2)


def read_run(folder: Path) -> None:
    """All that reads a run folder, except for drawing, which takes a second."""
    RunFolder(folder).reason(Unit("cache", "", {}, ("target",), ("cache",), lambda: None))
    report.load_curves(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "_sections", lambda run, results: [])
        patch.setattr(report, "_heat_plots", lambda results: [])
        report.build_report(folder)
    report.console_tables(load_results(folder))


READERS: dict[str, Callable[[Path], Any]] = {
    "cache": read_cache,
    "rows": lambda folder: [row for row in Rows.open(folder, "train")],  # noqa: C416
    "head": lambda folder: EagleHead.load(folder, the_target()),
    "imported head": lambda folder: import_draft(folder, the_target(), folder / "own"),
    "checkpoints": lambda folder: Checkpoints(folder).newest(lambda text: None),
    "run": read_run,
}


@pytest.mark.parametrize("kind", READERS)
@quick
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_in_one_line(kind: str, data: st.DataObject) -> None:
    files = known(kind)
    with TemporaryDirectory() as name:
        place = Path(name) / "run" / kind
        for path, content in files.items():
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            (place / path).write_bytes(content)
        victim = data.draw(st.sampled_from(sorted(files)))
        (place / victim).write_bytes(damaged(data, files[victim], Path(victim).suffix))
        before = around(place)
        refused_or_read(lambda: READERS[kind](place))
        assert around(place) == before


#: What JSON may hold that no writer of ours wrote. Deep lists and long numbers stand for their kinds.
ODD = [b"[" * 3000, b"9" * 5000, b"\xff", b'{"schema": 1, "results": [{"domain": "x", "temperature": 1, "K": 1e999}]}']
DEEP_YAML = b"[" * 1500  # its reader takes time by the square of the depth


@quick
@given(
    content=st.binary(max_size=40) | st.sampled_from(ODD),
    text=st.binary(max_size=40) | st.just(DEEP_YAML),
    where=st.data(),
)
def test_no_file_of_a_run_folder_is_more_than_unreadable(content: bytes, text: bytes, where: st.DataObject) -> None:
    with TemporaryDirectory() as name:
        write_run(place := Path(name) / "run")
        names = ["eval/eagle3.json", "stages/cache.json", "environment.json", "draft/training.jsonl", "resolved.yaml"]
        victim = where.draw(st.sampled_from(names))
        (place / victim).write_bytes(text if victim.endswith(".yaml") else content)
        refused_or_read(lambda: read_run(place))


YAML = (
    st.binary(max_size=80) | st.text(max_size=80).map(str.encode) | VALUES.map(lambda value: json.dumps(value).encode())
)
SOMETIMES_VALID = st.sampled_from(
    [
        b"seed: 2020-13-45",
        b"? [1]\n: 2",
        b"a: &a [*a]",
        b"seed: " + b"9" * 5000,
        b"[" * 3000,
        b"name: ../../x",
        b"!!python/object:os.x {}",
    ]
)
KEYS = st.sampled_from(
    ["name", "seed", "run_root", "target.path", "data.sources", "cache.k", "eagle.a", "evaluation.drafts"]
)


@quick
@given(text=YAML | SOMETIMES_VALID, key=KEYS, value=VALUES)
def test_a_config_is_valid_or_refused_in_one_line_and_no_name_leaves_the_folder_of_runs(
    text: bytes, key: str, value: Any
) -> None:
    with TemporaryDirectory() as name:
        file = Path(name) / "x.yaml"
        file.write_bytes(text)
        refused_or_read(lambda: load_config(file))
        file.write_text("seed: 0\n")

        def override() -> None:
            loaded = load_config(file, [f"{key}={json.dumps(value)}"])
            assert loaded.config.run.parent == Path(loaded.config.run_root).expanduser()

        refused_or_read(override)


LINES = st.lists(
    VALUES
    | st.fixed_dictionaries({"text": VALUES})
    | st.fixed_dictionaries(
        {"messages": st.lists(st.fixed_dictionaries({"role": VALUES, "content": VALUES}), max_size=3)}
    ),
    max_size=4,
)


@quick
@given(
    rows=LINES,
    rest=st.binary(max_size=40) | st.sampled_from([b"[" * 5000, b"9" * 5000, b"\xff", b'{"text": "\\ud800"}']),
)
def test_rows_of_json_are_documents_or_refused_in_one_line(rows: list[Any], rest: bytes) -> None:
    with TemporaryDirectory() as name:
        for suffix in (".jsonl", ".json"):
            file = Path(name) / f"rows{suffix}"
            lines = "\n".join(map(json.dumps, rows)) if suffix == ".jsonl" else json.dumps(rows)
            for content in (lines.encode(), lines.encode() + b"\n" + rest):
                file.write_bytes(content)
                source = DataSettings.model_validate({"sources": [{"kind": "json", "path": str(file)}]})
                refused_or_read(lambda source=source: load_documents(source))  # type: ignore[misc]


QUESTIONS = st.lists(
    VALUES
    | st.fixed_dictionaries({"question_id": VALUES, "category": VALUES, "turns": VALUES | st.lists(VALUES, max_size=2)})
    | st.fixed_dictionaries({"prompt": VALUES, "domain": VALUES})
    | st.fixed_dictionaries(
        {"messages": st.lists(st.fixed_dictionaries({"role": VALUES, "content": VALUES}), max_size=3)}
    ),
    max_size=4,
)


@quick
@given(rows=QUESTIONS, rest=st.binary(max_size=40) | st.sampled_from([b"[" * 5000, b"9" * 5000, b"\xff"]))
def test_questions_are_prompts_or_refused_in_one_line(rows: list[Any], rest: bytes) -> None:
    lines = "\n".join(map(json.dumps, rows)).encode()
    with TemporaryDirectory() as name:
        for content in (lines, lines + b"\n" + rest):
            (file := Path(name) / "questions.jsonl").write_bytes(content)
            writer = Writer(the_target(), "none")
            refused_or_read(lambda: read_questions(file, EvalSettings(), writer, 100))  # noqa: B023
