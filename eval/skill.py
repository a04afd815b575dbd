"""`skill-speculative-tuning.md`: what the tuner found, in words, tables and the flags of three engines.

Writes text from the tuner's document (`draftsmith.eval.tune`); measures nothing.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from draftsmith.eval.gate import reached

#: vLLM's method, SGLang's algorithm and TensorRT-LLM's decoding type of each kind of draft; None: the engine has none.
ENGINES: dict[str, tuple[str | None, str | None, str | None]] = {
    "eagle3": ("eagle3", "EAGLE3", "Eagle3"),
    "eagle1": ("eagle", "EAGLE", None),
    "medusa": ("medusa", None, None),
    "draft-lm": ("draft_model", "STANDALONE", "Draft_Target"),
    "prompt-lookup": ("ngram", "NGRAM", "NGram"),
}
LOOKUP = 3  # the longest suffix that `PromptLookup` searches for

PAGE = """---
name: speculative-tuning
description: How to run speculative decoding for {target} on the measured workload; which draft, how much to draft, when not to.
---

# Speculative decoding for {target}

{verdict}

Made by `draftsmith tune`; everything below is in `tune.json` beside this page. Speed-ups are over plain decoding at batch
{batch} and temperature {temperature:g}, prefill included; intervals are 95 %, bootstrapped over prompts (and timings).

## What to run

{recommendation}

{flags}

## Rules at run time

{rules}

## Evidence

Workload: {workload}.

### The best settings, decoded for real

{verified}
{unseen}
### The best of each draft and kind of tree, predicted

{families}

### By domain, predicted

{domains}

### Batch size

Predicted, prefill left out, as in a server that batches continuously. Where settings were timed for real, that says whether
batch {batch} pays.

{batches}

### Temperature

*Greedy* drafts the likeliest token at every temperature, as engines do by default; the first columns let the draft sample.
Predicted; where settings were timed for real, that says whether T = {temperature:g} pays.

{temperatures}

### Costs

{costs}

## How it was found

Plain decoding wrote the texts. Along them, at every position, each draft was asked once for its longest proposal; from this
recording every shorter chain and smaller tree was scored by replay, without decoding again. What is proposed depends on the
committed text alone, so at temperature 0 replay gives the very counts of decoding; above it, a sampled token that was emitted had
been accepted with min(p, q) / p, which leaves only the choice of texts to chance. Predicted time is verifies × (draft + verify +
rest) + prefill, each timed inside the decoder's own loop{stated}.
"""


def skill_page(document: Mapping[str, Any]) -> str:
    """The page for a document of `Tuner.run` that names its `drafts` (kind, path, taps)."""
    workload = document["workload"]
    domains = ", ".join(f"{count} prompts of {domain}" for domain, count in workload["prompts"].items())
    return PAGE.format(
        target=document["target"]["path"],
        verdict=verdict(document),
        batch=document["batch"],
        temperature=document["temperature"],
        recommendation=_recommendation(document),
        flags=_flags(document),
        rules=_rules(document),
        workload=f"{domains}; {workload['prompt_tokens']:.0f} tokens of prompt, {workload['new_tokens']:.0f} new (mean)",
        verified=_verified(document["verified"]),
        unseen=_unseen(document["unseen"]),
        families=_predicted(document["families"]),
        domains=_table(
            ("domain", "tokens per verify", "speed-up"),
            [(e["domain"], _span(e["tokens_per_verify"]), _span(e["speedup"])) for e in document["by_domain"]],
        ),
        batches=_batches(document["batches"]),
        temperatures=_temperatures(document["temperatures"]),
        costs=_costs(document["costs"]),
        stated=" (here: stated for another machine, without prefill)" if document["costs"]["stated"] else "",
    )


def verdict(document: Mapping[str, Any]) -> str:
    """The answer in one sentence."""
    chosen = document["chosen"]
    measured = any(entry["speedup"] for entry in document["verified"])
    speed = f"{_span(chosen['speedup'])}× {'measured' if measured else 'predicted'}"
    where = f"at batch {document['batch']}, T = {document['temperature']:g}"
    if not chosen["pays"]:
        return (
            f"**Decode plainly: no setting pays {where}.** The best, {chosen['draft']} with a {chosen['tree']}, has a speed-up of "
            f"{speed}."
        )
    return f"**Speculate with {chosen['draft']}, {chosen['tree']}: {speed} {where}.**"


def _recommendation(document: Mapping[str, Any]) -> str:
    chosen, runtime = document["chosen"], document["runtime"]
    if not chosen["pays"]:
        return "Plain decoding. The flags below are of the best setting, for the day that costs or the draft change."
    tau = _span(chosen["tokens_per_verify"])
    return (
        f"{chosen['draft']}, {chosen['tree']}, {chosen['drafting']} drafting: {tau} tokens per verify. Up to temperature "
        f"{runtime['most_temperature']:g} and batch {runtime['most_batch']} as measured; beyond, decode plainly."
    )


def engine_settings(document: Mapping[str, Any], engine: str) -> dict[str, Any] | None:
    """The best predicted setting that the engine can draft. None where it has no fitting method.

    vLLM drafts chains alone; SGLang and TensorRT-LLM EAGLE-2's dynamic trees of EAGLE heads too (with confidence temperature 1);
    none of them a static tree.
    """
    place = ("vllm", "sglang", "trtllm").index(engine)
    for entry in (document["chosen"], *document["families"]):  # measured before predicted, the best first
        kind = document["drafts"][entry["draft"]]["kind"]
        trees = engine != "vllm" and kind in ("eagle1", "eagle3") and entry.get("confidence_temperature") == 1.0
        if ENGINES[kind][place] is not None and (entry["family"] == "chain" or trees):
            return dict(entry)
    return None


def _flags(document: Mapping[str, Any]) -> str:
    parts = []
    for engine, name, write in (
        ("vllm", "vLLM", _vllm),
        ("sglang", "SGLang", _sglang),
        ("trtllm", "TensorRT-LLM", _trtllm),
    ):
        entry = engine_settings(document, engine)
        if entry is None:
            parts.append(f"**{name}**: it has no method for any of these drafts.")
            continue
        kind = document["drafts"][entry["draft"]]["kind"]
        best = f"{entry['draft']}, {entry['tree']}, predicted {_span(entry['speedup_predicted'])}×"
        export = (
            f" Export first: `draftsmith export RUN --to {engine} --draft {_exported(document, entry)}`."
            if kind != "prompt-lookup"
            else ""
        )
        parts.append(f"**{name}** ({best}).{export}\n\n{write(document, entry, kind)}")
    return "\n\n".join(parts)


def _exported(document: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    """A draft as `export` takes it: its name, or its folder where it lies outside of the run."""
    path = str(document["drafts"][entry["draft"]].get("path", ""))
    return shlex.quote(path) if path.startswith("/") else str(entry["draft"])


def _folder(engine: str, entry: Mapping[str, Any]) -> str:
    return f"RUN/export/{engine}/{entry['draft']}"


def _vllm(document: Mapping[str, Any], entry: Mapping[str, Any], kind: str) -> str:
    config: dict[str, Any] = {"method": ENGINES[kind][0], "num_speculative_tokens": entry["K"]}
    if kind == "prompt-lookup":
        config |= {"prompt_lookup_max": LOOKUP, "prompt_lookup_min": 1}
    else:
        config["model"] = _folder("vllm", entry)
        if entry["drafting"] == "sampled":
            config["draft_sample_method"] = "probabilistic"
    return _code("bash", f"vllm serve {_target(document)} --speculative-config {shlex.quote(json.dumps(config))}")


def _sglang(document: Mapping[str, Any], entry: Mapping[str, Any], kind: str) -> str:
    flags = [f"--speculative-algorithm {ENGINES[kind][1]}"]
    if kind == "prompt-lookup":
        flags.append(f"--speculative-num-draft-tokens {entry['nodes'] + 1}")
    else:
        flags += [
            f"--speculative-draft-model-path {_folder('sglang', entry)}",
            f"--speculative-num-steps {entry['K']}",
            f"--speculative-eagle-topk {entry.get('width', 1)}",
            f"--speculative-num-draft-tokens {entry['nodes'] + 1}",
        ]
        if entry["drafting"] == "sampled":
            flags.append("--speculative-use-rejection-sampling")
    return _code(
        "bash", f"python -m sglang.launch_server --model-path {_target(document)} \\\n  " + " \\\n  ".join(flags)
    )


def _trtllm(document: Mapping[str, Any], entry: Mapping[str, Any], kind: str) -> str:
    lines = ["speculative_config:", f"  decoding_type: {ENGINES[kind][2]}", f"  max_draft_len: {entry['K']}"]
    if kind == "prompt-lookup":
        lines.append(f"  max_matching_ngram_size: {LOOKUP}")
    else:
        lines.append(f"  speculative_model: {_folder('trtllm', entry)}")
    if kind == "eagle3":  # its ids are block outputs counted from 0, as our taps are
        lines.append(f"  eagle3_layers_to_capture: {list(document['drafts'][entry['draft']]['taps'])}")
    if "width" in entry:
        lines += [
            "  use_dynamic_tree: true",
            f"  dynamic_tree_max_topK: {entry['width']}",
            f"  max_total_draft_tokens: {entry['nodes']}",
        ]
    command = _code("bash", f"trtllm-serve {_target(document)} --config speculative.yaml")
    return _code("yaml", "\n".join(lines)) + "\n\n" + command


def _target(document: Mapping[str, Any]) -> str:
    return shlex.quote(document["target"]["path"])


def _code(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def _rules(document: Mapping[str, Any]) -> str:
    r, heat = document["runtime"], document["temperatures"]
    greedy = reached(
        [entry | {"pays": entry["greedy"]["pays"]} for entry in heat], "temperature", document["temperature"]
    )
    highest = "none of those measured" if r["most_temperature"] < 0 else f"{r['most_temperature']:g}"
    plainly = "none of those measured" if greedy is None else f"{greedy:g}"
    code = "\n".join(
        [
            "from draftsmith.eval.gate import SpeculationGate",
            "",
            f"gate = SpeculationGate(**{json.dumps(r)})",
            "if gate.should_speculate(temperature, batch):  # per step; constant time",
            "    ...  # draft, verify",
            "    gate.observe(accepted, drafted)",
        ]
    )
    return "\n".join(
        [
            f"1. **Temperature gate**: speculate up to T = {highest} with sampled drafting, {plainly} with greedy drafting.",
            f"2. **Batch limit**: refuse above {r['most_batch']} sequences: the forward is bound by computation there, or not "
            "measured.",
            f"3. **Fallback**: over the last {r['window']} verifies, Σ accepted / Σ drafted (the depth, {document['chosen']['K']}) "
            f"below {r['break_even']:.3f} costs more than it saves: decode plainly.",
            f"4. **Retry** after {r['retry_after']:,} plain steps, with an empty window: trials that fail then cost at most 2 % of "
            "the time.",
            "5. **Again**: a new target, draft, engine or machine needs new numbers: `draftsmith tune CONFIG`.",
            "",
            "As code:",
            "",
            _code("python", code),
        ]
    )


def _verified(entries: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for e in entries:
        row = [e["draft"], e["tree"], e["drafting"], f"{e['predicted_tokens_per_verify']:.3f}"]
        row += [_span(e["measured_tokens_per_verify"]), f"{e['tokens_per_verify_error']:+.1%}"]
        row += (
            [_span(e["foreseen"]), _span(e["speedup"]), f"{e['speedup_error']:+.1%}"]
            if e["speedup"]
            else ["", "not timed", ""]
        )
        rows.append(row)
    heads = (
        "draft",
        "tree",
        "drafting",
        "tokens per verify, predicted",
        "measured",
        "error",
        "speed-up, predicted",
        "measured",
        "error",
    )
    return _table(heads, rows)


def _unseen(found: Mapping[str, Any]) -> str:
    if not found:
        return ""
    tau = _span(found["tokens_per_verify"])
    return f"\nOn {found['prompts']} prompts that the choice was not made on: {tau} tokens per verify.\n"


def _predicted(entries: Sequence[Mapping[str, Any]]) -> str:
    return _table(
        ("draft", "tree", "drafting", "tokens per verify", "speed-up"),
        [
            (e["draft"], e["tree"], e["drafting"], _span(e["tokens_per_verify"]), _span(e["speedup_predicted"]))
            for e in entries
        ],
    )


def _batches(entries: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            e["batch"],
            e["tree"],
            _span(e["speedup_predicted"]),
            _yes(e["pays"]),
            e["best"]["tree"],
            _span(e["best"]["speedup_predicted"]),
        )
        for e in entries
    ]
    return _table(("batch", "setting", "speed-up", "pays", "best of this draft", "speed-up"), rows)


def _temperatures(entries: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            f"{e['temperature']:g}",
            f"{e['tree']}, {e['drafting']}",
            _span(e["tokens_per_verify"]),
            _span(e["speedup_predicted"]),
            _yes(e["pays"]),
            e["greedy"]["tree"],
            _span(e["greedy"]["speedup_predicted"]),
            _yes(e["greedy"]["pays"]),
        )
        for e in entries
    ]
    heads = ("T", "best setting", "tokens per verify", "speed-up", "pays", "best greedy one", "speed-up", "pays")
    return _table(heads, rows)


def _costs(costs: Mapping[str, Any]) -> str:
    if costs["stated"]:
        return "Stated, in milliseconds: " + "; ".join(f"`{json.dumps(row)}`" for row in costs["rows"]) + "."
    rows = [
        (
            row["draft"],
            row["tree"],
            f"{row['nodes']:.1f}",
            *(_span(row[part]) for part in ("draft_ms", "verify_ms", "rest_ms")),
        )
        for row in costs["rows"]
    ]
    heads = ("draft", "tree", "tokens read", "draft, ms", "verify, ms", "rest, ms")
    return "Medians of interleaved repetitions with their range.\n\n" + _table(heads, rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return "\n".join(lines + [f"| {' | '.join(map(str, row))} |" for row in rows])


def _span(interval: Mapping[str, float]) -> str:
    return f"{interval['value']:.2f} ({interval['low']:.2f} to {interval['high']:.2f})"


def _yes(pays: bool) -> str:
    return "yes" if pays else "**no**"
