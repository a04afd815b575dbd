"""What is logged to trackers, under which names: the one list that the code, `draftsmith dashboards` and docs/tracking.md share.

Knows names and the entries of a result; knows no tracker. A name that is logged and not listed here, or listed and never logged,
fails a test.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Key:
    """A documented name. <stage> is `target`, `distill` or a head's name, <k> a position counted from 0, and so on (`PARTS`)."""

    name: str
    meaning: str
    kind: str = "number"  # or "table", "image", "page"

    @property
    def pattern(self) -> str:
        """A regular expression of the names that are logged."""
        parts = [PARTS[part] if part in PARTS else re.escape(part) for part in re.split(r"(<\w+>)", self.name)]
        return "^" + "".join(parts) + "$"


PARTS = {
    "<stage>": r"[\w.-]+",
    "<draft>": r"[\w.-]+",
    "<domain>": r"[\w.-]+",
    "<at>": r"T[\d.]+(?:-greedy)?",
    "<k>": r"\d+",
}
ACCEPTANCE = "of drafts: Σ min(p, q) in training, at the first position"
TRAINING = (
    Key("<stage>/step", "optimiser step of the stage, from 1"),
    Key(
        "<stage>/loss",
        "mean over the step's supervised tokens (nats per token for the target and for cross-entropy losses)",
    ),
    Key("<stage>/learning_rate", "of the matrices"),
    Key("<stage>/tokens_per_second", "tokens of the rows that were read"),
    Key("<stage>/memory_gb", "the most held so far, on the accelerator where there is one, else in main memory"),
    Key("<stage>/expected_acceptance", ACCEPTANCE),
    Key("<stage>/expected_acceptance/<k>", "of drafts with rollouts: the same at position k"),
    Key("<stage>/data_wait", "of drafts: share of the time spent waiting for rows"),
    Key(
        "<stage>/held_out_run_length", "of drafts, at validations: expected accepted tokens of a chain on held-out rows"
    ),
    Key("<stage>/best_run_length", "of drafts, at validations: the best so far, whose weights are kept"),
    Key("<stage>/best_step", "of drafts, at validations: its step"),
    Key("<stage>/best_match", "of drafts, at validations: its share of greedy matches at the first position, held out"),
    Key(
        "<stage>/vocabulary_coverage",
        "of heads with a smaller vocabulary, once: share of the training tokens that it holds",
    ),
    Key(
        "<stage>/acceptance_ceiling",
        "of heads with a smaller vocabulary, once: the target's held-out mass inside it, the most α can be",
    ),
)
MEASURED = {
    "alpha": "mean of Σ min(p, q) over the drafted positions reached; at T = 0 the match rate",
    "acceptance_rate": "accepted / drafted",
    "tokens_per_verify": "tokens emitted per forward pass of the target, the bonus token included",
    "alpha_teacher_forced": "mean of Σ min(p, q) on held-out text, without decoding; at T = 0 the match rate",
    "speedup": "measured tokens per second over those of plain decoding",
    "speedup_predicted": "what tokens per verify and the two costs below come to",
    "draft_cost": "time of a draft step in plain target steps",
    "verify_cost": "time of a verify of K + 1 tokens in plain target steps",
}
EVALUATION = (
    *(Key(f"eval/<draft>/<domain>/<at>/{name}", meaning) for name, meaning in MEASURED.items()),
    Key("eval/<draft>/<domain>/<at>/identical", "share of prompts whose output equals plain greedy decoding; at T = 0"),
    Key("eval/<draft>/<domain>/<at>/n_alpha/<k>", "share accepted at position k of those that reached it"),
    Key("eval/results", "every result of the run with its intervals, one row each", "table"),
    Key("eval/n_alpha", "n_alpha of every draft, domain and temperature by position, one row each", "table"),
    Key(
        "eval/n_alpha_heat_map",
        "the same at the lowest temperature, drafts by positions, one picture per domain",
        "image",
    ),
    Key("eval/report", "the report's page", "page"),
)
KEYS = TRAINING + EVALUATION


def at(temperature: float, drafting: str) -> str:
    """How a temperature and a way of drafting stand in a name; the usual way is not said."""
    return f"T{temperature:g}" + ("-greedy" if temperature > 0 and drafting == "greedy" else "")


def part(text: str) -> str:
    """A domain as one part of a name: it may be any text."""
    return re.sub(r"[^\w.-]+", "_", text)


def evaluation_values(draft: str, entry: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of one entry of a result (docs/conventions.md) under their documented names; what was not measured is missing."""
    place = f"eval/{draft}/{part(str(entry['domain']))}/{at(entry['temperature'], entry['drafting'])}"
    found = {f"{place}/{name}": entry[name]["value"] for name in MEASURED if entry.get(name)}
    found |= {f"{place}/n_alpha/{k}": item["value"] for k, item in enumerate(entry.get("n_alpha", [])) if item}
    if entry.get("identical"):
        same, of = entry["identical"]
        found[f"{place}/identical"] = same / of
    return found


def documented(name: str) -> Iterator[Key]:
    """The keys that a logged name is of: one, or none for a name that nobody documented."""
    return (key for key in KEYS if re.match(key.pattern, name))


def table() -> str:
    """Markdown of all keys, as docs/tracking.md holds it."""
    rows = [f"| `{key.name}` | {key.kind} | {key.meaning} |" for key in KEYS]
    return "\n".join(["| key | kind | what it is |", "|---|---|---|", *rows])
