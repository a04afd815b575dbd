"""docs/tuning.md: how the tuner works and is told what to do, and the study's rows as tables. Writes text, measures nothing."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from markdown import machine, span, table

HOW = """# Tuning: which draft, how much of it, and when not to

`draftsmith tune CONFIG` (`make tune CONFIG=FILE`) profiles *this* target on *this* workload and writes `tune.json` and
`skill-speculative-tuning.md` into the run folder: the draft, length or tree, exact flags for vLLM, SGLang and TensorRT-LLM, and
the rules at run time with their thresholds. `draftsmith theory` prints what the textbook expects of a chain, for any α and cost.

## How it works

1. **Record.** Plain decoding writes each prompt's text. Along it, at every position, each draft is asked for its proposal below
   the true prefix (`eval/replay.py`). One walk per draft and temperature scores every chain and every static tree, one more per
   width every dynamic tree of that width.
2. **Replay.** A verify begins where the last one ended. At temperature 0, and for deterministic drafts at any, the counts are
   those of decoding, exactly. For sampled drafts the expectation given the text is exact for chains (an emitted token x had been
   accepted with probability min(p, q)(x) / p(x)) and unbiased for trees; which texts are written is chance, as it is in
   decoding. What cannot be replayed: drafters that learn from their own rejections (lookahead), chains that stop by confidence, and
   dynamic trees with sampled children, whose growth depends on what was drawn: above temperature 0 those with the likeliest are
   scored, and the tuner says so.
3. **Time.** Draft, verify and the rest of each step are timed inside the decoder's own loop (`eval/timing.py`, `eval/costs.py`),
   settings and prompts in turn, at several batch sizes; or they are stated for another machine. Beside every timed setting the same
   prompt is decoded plainly, and the setting's seconds are scaled to the median plain step.
4. **Predict** time = verifies × (draft + verify + rest) + start, for every setting, with intervals bootstrapped over prompts and
   timings. The start (prefill, and what the first draft takes more than another) is on a line over the prompt's length.
5. **Check.** The best few are decoded for real, beside plain decoding, by the same stopwatch, and the error of the prediction is
   reported. Both sides add up means of verifies, and both take ratios within a round of prompts and the median of the rounds: a
   minimum or a median of either would leave out other parts of the time than the other side's.
6. **Limits.** The temperature gate is the highest temperature up to which, from the one that was chosen for, the best setting pays
   with its whole interval at all that were tried, the batch limit likewise; what was timed for real decides for its own temperature
   and batch. The fallback's threshold is the acceptance at which a verify costs what it saves, its window so long that
   the usual acceptance stands three standard errors above that, and the wait before a new trial so long that trials which fail
   cost at most 2 %.

The prompts, domains, lengths and drafts are those of `evaluation`. Fields of `tune` say what is tried:

```yaml
tune:
  temperature: 0.0 # to choose for; the gate is sought among temperatures
  temperatures: [0.0, 0.5, 1.0, 1.5]
  K: 8 # longest chain
  depth: 6 # deepest tree
  budgets: [15, 31, 63] # drafted nodes: with the pending token 16, 32, 64 are read
  widths: [4, 8]
  batches: [1, 4, 16] # the first is the one to choose for
```

A laptop plans for a cluster from costs that are stated, one entry per batch size; acceptance is measured here all the same:

```yaml
tune:
  batches: [1, 32]
  costs:
    - {batch: 1, target_step_ms: 22, draft_step_ms: 1.1, verify_ms: {8: 22.6, 64: 26}, overhead_ms: 0.4}
    - {batch: 32, target_step_ms: 29, draft_step_ms: 1.6, verify_ms: {8: 47, 64: 240}, overhead_ms: 0.6}
```

`draft_step_ms` is one for all drafts: where theirs differ, plan for one at a time (`evaluation.drafts=[eagle3]`). Prompt lookup is
free, Medusa heads draft all their tokens in one step, and prefill is left out.

In a server's loop the rules are a class, `draftsmith.eval.gate.SpeculationGate`; `runtime` in `tune.json` holds its arguments.
"""

MEASURED = """
## Measured

Made by `make bench-tune` from a finished demo; the numbers are in `docs/studies/tune.json`. The *heavy twin* computes the same
function as the demo's target at about twelve times its cost (blocks whose output projections are zero). Errors are predicted ÷
measured − 1, on the same prompts; decoding at temperature 1 draws other texts than the recording's, so its errors hold the noise
of both. Intervals are 95 %.

Machine: {machine}.

{verdicts}

### The best settings, decoded for real

{verified}

### By temperature, predicted

{temperatures}

### By batch, predicted, prefill left out

{batches}
"""


def page(rows: list[dict[str, Any]], verdicts: list[str], environment: dict[str, Any]) -> str:
    """The page for a study's rows, and the tuner's verdict on each target and temperature in their order."""
    targets = dict.fromkeys(
        (r["settings"]["target"], r["settings"]["temperature"]) for r in rows if "rank" in r["settings"]
    )
    said = [f"- {name}, T = {heat:g}: {text}" for (name, heat), text in zip(targets, verdicts, strict=True)]
    return HOW + MEASURED.format(
        machine=machine(environment),
        verdicts="\n".join(said),
        verified=_verified(rows),
        temperatures=table(
            ("target", "draft", "T", "drafting", "tree", "speed-up"),
            [
                _cells(r, "target", "draft", "temperature", "drafting", "tree")
                for r in _of(rows, "speed-up, predicted, by temperature")
            ],
        ),
        batches=table(
            ("target", "T", "batch", "draft", "tree", "speed-up"),
            [
                _cells(r, "target", "temperature", "batch", "draft", "tree")
                for r in _of(rows, "speed-up, predicted, by batch")
            ],
        ),
    )


def _of(rows: list[dict[str, Any]], what: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["what"] == what]


def _cells(row: dict[str, Any], *keys: str) -> list[str]:
    return [str(row["settings"][key]) for key in keys] + [span(row, to=" to ")]


def _verified(rows: list[dict[str, Any]]) -> str:
    """Four study rows become one line."""
    lines = []
    for tokens, tokens_error, speed, speed_error in zip(
        _of(rows, "tokens per verify"),
        _of(rows, "tokens per verify, predicted less decoded"),
        _of(rows, "speed-up over plain decoding"),
        _of(rows, "speed-up, predicted less measured"),
        strict=True,
    ):
        line = [str(tokens["settings"][key]) for key in ("target", "temperature", "draft", "tree", "drafting")]
        lines.append(
            [*line, span(tokens, to=" to "), _judged(tokens_error), span(speed, to=" to "), _judged(speed_error)]
        )
    heads = (
        "target",
        "T",
        "draft",
        "tree",
        "drafting",
        "tokens per verify",
        "error (goal 3 %)",
        "speed-up",
        "error (goal 10 %)",
    )
    return table(heads, lines)


def _judged(row: dict[str, Any]) -> str:
    return f"{row['value']:+.1%}" if row["met"] else f"**{row['value']:+.1%}**"
