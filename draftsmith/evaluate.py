"""What `eval-acceptance` does beside decoding: the result's file, thresholds, the comparison with a saved result, and running a
result again from its file alone.

Knows run folders and results; what a metric is, `draftsmith.eval` knows.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith import __version__
from draftsmith.errors import UserError
from draftsmith.eval.compare import compare
from draftsmith.eval.depth_one import CHECKLIST
from draftsmith.eval.results import SCHEMA, YARDSTICKS, left_out
from draftsmith.eval.settings import EvalSettings, result_name

if TYPE_CHECKING:
    from draftsmith.eval.drafters import Drafter
    from draftsmith.eval.prompts import Prompt
    from draftsmith.models.target import Target

MISSED = 3  # exit code: measured, and not good enough
UNLEARNT = (*YARDSTICKS, "prompt-lookup")
#: Keys of an entry that a second run on the same machine gives again, number for number.
REPEATABLE = (
    "domain", "temperature", "K", "tree", "drafting", "prompts", "answers", "verifies", "tokens", "alpha", "alpha_by_depth",
    "acceptance_rate", "tokens_per_verify", "n_alpha", "survival", "by_position", "by_prompt_length", "identical",
)  # fmt: skip


@dataclass(frozen=True)
class Gates:
    """What a result must reach. drafts: those that are judged (none named: all that learnt something); baseline: a saved result or
    the run folder that it is in."""

    min_tokens_per_verify: float | None = None
    min_alpha: float | None = None
    min_speedup: float | None = None
    baseline: Path | None = None
    drafts: Sequence[str] = ()

    @property
    def floors(self) -> dict[str, float]:
        """The least value of each metric that has one."""
        said = {"tokens_per_verify": self.min_tokens_per_verify, "alpha": self.min_alpha, "speedup": self.min_speedup}
        return {name: floor for name, floor in said.items() if floor is not None}


def document(
    target: "Target",
    about: Mapping[str, Any],
    target_path: str,
    settings: EvalSettings,
    prompts: Mapping[str, Sequence["Prompt"]],
    results: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The content of `eval/<draft>.json`: the results, and all that is needed to measure them again."""
    from draftsmith.eval.prompts import Writer, stored

    dtype = str(target.dtype).removeprefix("torch.")
    return {
        "schema": SCHEMA,
        "version": __version__,
        "draft": about,
        "target": {"path": target_path, "fingerprint": target.fingerprint(), "dtype": dtype},
        "settings": settings.model_dump(mode="json", exclude={"drafts"}),
        "template": Writer(target, settings.template).template,
        "results": results,
        "prompts": stored(prompts),
    }


def trained_match(folder: Path) -> float | None:
    """The share of greedy matches on held-out rows that a training noted of the weights that it kept; None where it noted none."""
    try:
        lines = [json.loads(line) for line in (folder / "training.jsonl").read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return None
    noted = [line["best_match"] for line in lines if isinstance(line, dict) and "best_match" in line]
    return float(noted[-1]) if noted else None


def contradictions(run: Path, say: Callable[[str], None]) -> bool:
    """Say where training, teacher forcing and decoding contradict each other about the first drafted token, and what to look at."""
    lines = [line for draft, found in _documents(run).items() for line in _contradictions(draft, found)]
    for line in lines:
        say(line)
    return bool(lines)


def judge(run: Path, gates: Gates, say: Callable[[str], None]) -> bool:
    """Say what the run's results miss: a threshold, or a baseline that was better. Returns whether they miss anything."""
    documents = _documents(run)
    judged = _judged(documents, gates)
    missed = [line for draft in judged for line in _below(draft, documents[draft], gates.floors)]
    if gates.baseline is not None:
        missed += _worse(judged, documents, gates.baseline, say)
    for line in missed:
        say(f"MISSED: {line}")
    return bool(missed)


def _documents(run: Path) -> dict[str, dict[str, Any]]:
    stale = {line.split(" ")[0] for line in left_out(run)}
    paths = sorted((run / "eval").glob("*.json"))
    return {path.stem: _read(path) for path in paths if path.name not in stale}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["schema"] != SCHEMA or not isinstance(found["results"], list):
            raise ValueError(f"schema {found['schema']}")
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path}: not a result of eval-acceptance ({error!r}); give one such as eval/eagle3.json"
        ) from error
    return found


def check_asked(asked: Sequence[str], evaluated: Sequence[str]) -> None:
    """Raises UserError for a draft that is to be judged and is not evaluated."""
    names = [result_name(draft) for draft in evaluated]
    if unknown := [draft for draft in asked if result_name(draft) not in names]:
        raise UserError(
            f"--draft {unknown[0]}: not evaluated by this config; there are {', '.join(names)}, and evaluation.drafts takes more"
        )


def _judged(documents: Mapping[str, Any], gates: Gates) -> list[str]:
    check_asked(gates.drafts, list(documents))
    asked = [result_name(draft) for draft in gates.drafts]
    return asked or [name for name in documents if name not in UNLEARNT] or list(documents)


def _contradictions(draft: str, found: dict[str, Any]) -> list[str]:
    """The lines about one draft's result."""
    lines = []
    for text, check in found.get("depth_one", {}).items():
        if not check["ok"]:
            sides = [f"{check[side]:.3f} {side}" for side in ("trained", "teacher_forced", "decoded") if side in check]
            lines.append(
                f"CONTRADICTION: {draft}: the first drafted token matches in {' and '.join(sides)} of the same "
                f"{check['positions']} tokens of {text}; check:"
            )
            lines += [f"  - {item}" for item in CHECKLIST]
    return lines


def _below(draft: str, found: dict[str, Any], floors: Mapping[str, float]) -> list[str]:
    lines = []
    for entry in found["results"]:
        for name, floor in floors.items():
            measured = entry.get(name) or {}
            where = f"{draft} on {entry['domain']} at T = {entry['temperature']:g}"
            if not measured:
                lines.append(f"{where}: {name} was not measured, at least {floor:g} is asked for")
            elif measured["value"] < floor:
                interval = f"{measured['low']:.3f} to {measured['high']:.3f}"
                lines.append(f"{where}: {name} {measured['value']:.3f} ({interval}) is below {floor:g}")
    return lines


def _worse(
    judged: Sequence[str], documents: Mapping[str, Any], baseline: Path, say: Callable[[str], None]
) -> list[str]:
    """Prints every difference; returns those that are worse by more than chance."""
    if baseline.is_dir():
        pairs = [(draft, place) for draft in judged if (place := baseline / "eval" / f"{draft}.json").is_file()]
    else:
        pairs = [(draft, baseline) for draft in judged if draft == baseline.stem or len(judged) == 1]
    lines, compared = [], 0
    for draft, place in pairs:
        for difference in compare(_read(place), documents[draft]):
            say(f"against {place}: {draft} on {difference}")
            compared += 1
            if difference.worse:
                lines.append(f"{draft} on {difference} is worse than {place}")
    if not compared:
        raise UserError(
            f"--baseline {baseline}: no result of {', '.join(judged)} in a domain, temperature and K of this config; give a "
            "result of the same draft's name (or one --draft), or a run folder with one"
        )
    return lines


def again(path: Path, say: Callable[[str], None]) -> bool:
    """Measure a result once more from its file alone; says and returns whether acceptance is what the file holds."""
    from draftsmith.eval.acceptance import PlainRuns, evaluate
    from draftsmith.eval.prompts import Writer, restored

    saved = _read(path)
    try:
        settings = EvalSettings.model_validate(saved["settings"] | {"timed_prompts": 0})
        prompts = restored(saved["prompts"])
        target, drafter = _models(path, saved)
        template = saved["template"]
    except (LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: written by a version that did not keep all that a second run needs; evaluate again"
        ) from error
    if Writer(target, settings.template).template != template:
        raise UserError(f"{path}: measured with another chat template than the target has now; restore it")
    results = json.loads(json.dumps(evaluate(target, drafter, prompts, settings, PlainRuns())))
    wrong = [
        f"{new['domain']} at T = {new['temperature']:g}: {name} is {_short(new.get(name))}, the file says {_short(old.get(name))}"
        for new, old in zip(results, saved["results"], strict=True)
        for name in REPEATABLE
        if new.get(name) != old.get(name)
    ]
    for line in wrong:
        say(f"DIFFERS: {line}")
    say(
        f"{path}: {len(results)} results again, {'acceptance is identical' if not wrong else f'{len(wrong)} numbers differ'}"
    )
    return not wrong


def _short(value: Any) -> Any:
    return value.get("value", value) if isinstance(value, dict) else value


def _models(path: Path, saved: dict[str, Any]) -> tuple["Target", "Drafter"]:
    """Target and drafter of a result; their paths are relative to its run folder, or not."""
    from draftsmith.eval.decode import as_drafter
    from draftsmith.eval.drafters import LMDrafter, PromptLookup
    from draftsmith.models.target import Target

    run, about = path.resolve().parent.parent, saved["draft"]
    place = run / Path(saved["target"]["path"]).expanduser()
    target = Target.load(place if place.is_dir() else saved["target"]["path"], saved["target"]["dtype"])
    if target.fingerprint() != saved["target"]["fingerprint"]:
        raise UserError(f"{path}: measured with target {saved['target']['fingerprint']}, {target.path} is another one")
    if about["kind"] == "prompt-lookup":
        return target, PromptLookup()
    if about["kind"] == "oracle":
        return target, LMDrafter(target)
    return target, as_drafter(run / about["path"], target)
