"""Reads the measured results of a run folder (`eval/*.json`, docs/conventions.md) and puts them in one order.

Knows the schema of the files and which draft a reader cares about; draws and prints nothing.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from draftsmith.errors import UserError
from draftsmith.eval.settings import result_name

SCHEMA = 1
MOST_DRAFTED = 10_000  # tokens per verify; a file that says more is no result
#: Drafts that mark a scale (nothing learnt, nothing to learn) and are never a run's headline.
YARDSTICKS = ("untrained", "oracle")
#: The order of tables and colours; any other name follows alphabetically.
ORDER = ("untrained", "prompt-lookup", "distilled", "eagle3-no-rollout", "eagle3", "oracle")


@dataclass(frozen=True)
class Measure:
    """A number with its 95 % interval and the count it rests on. `count` is 0 where the file states none."""

    value: float
    low: float
    high: float
    count: int


class Setting(NamedTuple):
    """What has to be equal for two results to be compared."""

    temperature: float
    K: int
    tree: str
    drafting: str

    @property
    def label(self) -> str:
        """As a reader sees it; what is usual (a chain, sampled drafting, at T = 0 greedy) is not said."""
        parts = [f"T = {self.temperature:g}", f"K = {self.K}"] + [self.tree] * (self.tree != "chain")
        return ", ".join(parts + ["greedy drafting"] * (self.temperature > 0 and self.drafting == "greedy"))


@dataclass(frozen=True)
class Sample:
    """A short text: the end of its prompt, and (text, depth) of each new token; depth 0 is the target's own."""

    prompt: str
    pieces: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Bin:
    """Drafted tokens of which a head was about equally sure: the mean of that, and the acceptance that followed."""

    confidence: float
    accepted: Measure


@dataclass(frozen=True)
class Result:
    """One entry of `results` in one file: a draft, measured in one domain at one temperature with one K and tree."""

    draft: str
    parameters: int | None
    domain: str
    temperature: float
    K: int
    tree: str
    prompts: int
    verifies: int
    identical: tuple[int, int] | None
    alpha: Measure | None
    tokens_per_verify: Measure | None
    n_alpha: tuple[Measure, ...]
    speedup: Measure | None
    draft_cost: Measure | None
    drafting: str = "greedy"
    survival: tuple[Measure, ...] = ()
    verify_cost: Measure | None = None
    sample: Sample | None = None
    calibration: tuple[Bin, ...] = ()
    speedup_predicted: Measure | None = None
    alpha_by_depth: tuple[Measure, ...] = ()
    alpha_teacher_forced: Measure | None = None

    @property
    def setting(self) -> Setting:
        """What has to be equal for two results to be compared."""
        return Setting(self.temperature, self.K, self.tree, self.drafting)


def measure(entry: Any) -> Measure | None:
    """`{"value", "low", "high", "count"}` or a bare number as a `Measure`; None for what was not measured (`{}`)."""
    if isinstance(entry, int | float) and not isinstance(entry, bool):
        return Measure(value := _finite(entry), value, value, 0)
    if not isinstance(entry, dict) or entry.get("value") is None:
        return None
    value = _finite(entry["value"])
    low, high = (_finite(bound) if (bound := entry.get(side)) is not None else value for side in ("low", "high"))
    return Measure(value, low, high, int(entry.get("count") or 0))


def _finite(number: Any) -> float:
    """JSON of Python's knows NaN and Infinity, which nothing measured is. Raises ValueError."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{value} is no measured number")
    return value


def _result(draft: str, parameters: int | None, entry: dict[str, Any]) -> Result:
    identical, K = entry.get("identical"), int(entry["K"])
    if not 0 <= K <= MOST_DRAFTED:
        raise ValueError(f"K is {K}")
    return Result(
        draft=draft,
        parameters=parameters,
        domain=str(entry["domain"]),
        temperature=_finite(entry["temperature"]),
        K=K,
        tree=str(entry.get("tree", "chain")),
        prompts=int(entry.get("prompts", 0)),
        verifies=int(entry.get("verifies", 0)),
        identical=(int(identical[0]), int(identical[1])) if identical else None,
        alpha=measure(entry.get("alpha")),
        tokens_per_verify=measure(entry.get("tokens_per_verify")),
        n_alpha=_measures(entry.get("n_alpha")),
        speedup=measure(entry.get("speedup")),
        draft_cost=measure(entry.get("draft_cost")),
        drafting=str(entry.get("drafting", "sampled" if entry["temperature"] else "greedy")),
        survival=_measures(entry.get("survival")),
        verify_cost=measure(entry.get("verify_cost")),
        speedup_predicted=measure(entry.get("speedup_predicted")),
        alpha_by_depth=_measures(entry.get("alpha_by_depth")),
        alpha_teacher_forced=measure(entry.get("alpha_teacher_forced")),
        sample=_sample(entry.get("sample")),
        calibration=tuple(
            Bin(_finite(item["confidence"]), found)
            for item in entry.get("calibration", [])
            if (found := measure(item["accepted"])) is not None
        ),
    )


def _measures(entries: Any) -> tuple[Measure, ...]:
    return tuple(found for item in entries or [] if (found := measure(item)) is not None)


def _sample(entry: Any) -> Sample | None:
    if not entry:
        return None
    return Sample(str(entry["prompt"]), tuple((str(text), int(depth)) for text, depth in entry["pieces"]))


def _rank(name: str) -> tuple[int, str]:
    return (ORDER.index(name) if name in ORDER else len(ORDER) - 1, name)


@dataclass(frozen=True)
class _File:
    """One file of results: when it was written, for which target ("" where it does not say), and what it holds."""

    path: Path
    written: int
    target: str
    results: list[Result]


def load_results(run: Path) -> list[Result]:
    """The run's present results, by draft in the order of `ORDER`. Raises UserError for a file that is none.

    Present are the drafts that the run's resolved.yaml evaluates, measured with the target of the newest file.
    """
    return [result for file in _present(run)[0] for result in file.results]


def left_out(run: Path) -> list[str]:
    """Files below `run`/eval that `load_results` leaves out, each with the reason."""
    return _present(run)[1]


def _present(run: Path) -> tuple[list[_File], list[str]]:
    paths = sorted((run / "eval").glob("*.json"), key=lambda path: _rank(path.stem))
    drafts = _evaluated(run)
    stale = [f"{path.name} (not in evaluation.drafts)" for path in paths if drafts and path.stem not in drafts]
    files = [_read(path) for path in paths if not drafts or path.stem in drafts]
    newest = max(files, key=lambda file: file.written, default=None)
    stale += [f"{file.path.name} (of another target)" for file in files if newest and file.target != newest.target]
    return [file for file in files if newest and file.target == newest.target], stale


def _evaluated(run: Path) -> list[str]:
    """The drafts that the run's configuration evaluates; empty where the folder does not say."""
    path = run / "resolved.yaml"
    if not path.is_file():
        return []
    try:
        resolved = yaml.safe_load(path.read_text(encoding="utf-8"))
        return [result_name(draft) for draft in (resolved or {}).get("evaluation", {}).get("drafts", [])]
    except (yaml.YAMLError, OSError, ValueError, AttributeError, TypeError, RecursionError) as problem:
        raise UserError(f"{path}: not readable as a run's settings; run the stage again to make it anew") from problem


def _read(path: Path) -> _File:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA:
            raise UserError(f"{path}: schema {document['schema']}, this version reads {SCHEMA}; evaluate again")
        parameters = document.get("draft", {}).get("parameters")
        found = [_result(path.stem, parameters, entry) for entry in document["results"]]
        target = str(document.get("target", {}).get("fingerprint", ""))
    except (OSError, ValueError, LookupError, ArithmeticError, TypeError, AttributeError, RecursionError) as problem:
        raise UserError(
            f"{path}: not a result of eval-acceptance ({problem!r}); remove it or evaluate again"
        ) from problem
    return _File(path, path.stat().st_mtime_ns, target, found)


def names(results: list[Result]) -> list[str]:
    """The drafts among `results`, in their order."""
    return list(dict.fromkeys(result.draft for result in results))


def domains(results: list[Result]) -> list[str]:
    """The domains among `results`, in the order of the files."""
    return list(dict.fromkeys(result.domain for result in results))


def by_setting(results: list[Result]) -> Iterator[tuple[Setting, list[Result]]]:
    """Groups of comparable results, the lowest temperature and smallest K first, and sampled drafting before greedy."""
    order = {result.setting for result in results}
    for setting in sorted(order, key=lambda s: (s.temperature, s.K, s.tree, s.drafting == "greedy")):
        yield setting, [result for result in results if result.setting == setting]


def headline(results: list[Result]) -> list[Result]:
    """The results a run is judged by: its best draft at the lowest temperature, one result per domain.

    Best is the highest mean tokens per verify over the domains, among the drafts that are no yardstick. Of several K or
    trees, the one with the highest mean counts. Empty when nothing was measured.
    """
    measured = [result for result in results if result.draft not in YARDSTICKS and result.tokens_per_verify is not None]
    if not measured:
        return []
    coldest = min(result.temperature for result in measured)
    groups: dict[tuple[str, Setting], list[Result]] = {}
    for result in measured:
        if result.temperature == coldest:
            groups.setdefault((result.draft, result.setting), []).append(result)

    def mean(group: list[Result]) -> float:
        values = [result.tokens_per_verify.value for result in group if result.tokens_per_verify is not None]
        return sum(values) / len(values)

    return max(groups.values(), key=mean)
