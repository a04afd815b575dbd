"""The README of an exported folder: how its engine is started with it, whose weights are in it, what it is expected to accept.

Writes text from what is given; reads nothing but a file of results.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.models.serving.layouts import ENGINES

#: vLLM's method and SGLang's algorithm for each kind of draft.
VLLM = {"eagle1": "eagle", "eagle3": "eagle3", "medusa": "medusa", "draft-lm": "draft_model"}
SGLANG = {"eagle1": "EAGLE", "eagle3": "EAGLE3", "draft-lm": "STANDALONE"}
DEFAULT_K = 5
MOVED = "Paths are absolute, so that this works in any folder of the machine that wrote it; after a move, write the new ones."
MARK = "exported by Draftsmith."  # tells a folder that may be written over


@dataclass(frozen=True)
class About:
    """What the README says. taps: of an EAGLE-3 head, our numbers; owned: whose embedding and output head the draft uses;
    size: bytes of the weights; notes: what was left out or changed."""

    name: str
    kind: str
    fmt: str
    folder: str
    target: str
    K: int
    taps: tuple[int, ...]
    owned: Mapping[str, str]
    size: int
    tensors: int
    notes: tuple[str, ...]
    results: Mapping[str, Any] | None


def read_results(path: Path) -> dict[str, Any]:
    """`eval/<draft>.json` of a run. Raises UserError where it cannot be read."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return {"results": [_entry(entry) for entry in document["results"]]}
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path}: not a result of eval-acceptance ({error!r}); evaluate again or leave it out"
        ) from error


def _entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What the README says of one result, each as the type that it must have. Raises ValueError and its like for others."""
    mean = entry.get("tokens_per_verify") or {}
    shares = [{"value": float(share["value"])} for share in entry.get("survival") or [] if "value" in share]
    if (K := int(entry.get("K", DEFAULT_K))) < 1:
        raise ValueError(f"K is {K}")
    return {
        "domain": str(entry["domain"]),
        "temperature": float(entry["temperature"]),
        "K": K,
        "tree": str(entry.get("tree", "chain")),
        "drafting": str(entry.get("drafting", "")),
        "tokens_per_verify": {key: float(mean[key]) for key in ("value", "low", "high")} if "value" in mean else {},
        "survival": shares,
    }


def drafted(results: Mapping[str, Any] | None) -> int:
    """K of the evaluation: tokens drafted per verify."""
    entries = results["results"] if results else []
    return int(entries[0].get("K", DEFAULT_K)) if entries else DEFAULT_K


def launch(about: About) -> str:
    """The command that serves the target with this draft; for transformers a program."""
    return {"vllm": _vllm, "speculators": _vllm, "sglang": _sglang, "trtllm": _trtllm, "transformers": _transformers}[
        about.fmt
    ](about)


def speculative_config(about: About) -> dict[str, Any]:
    """vLLM's `--speculative-config`."""
    return {"method": VLLM[about.kind], "model": about.folder, "num_speculative_tokens": about.K}


def trtllm_yaml(about: About) -> str:
    """TensorRT-LLM's `--config`: its ids of fused states are block outputs, as our taps are, and it reads them here alone."""
    kind = "Eagle3" if about.kind == "eagle3" else "Draft_Target"
    lines = [
        "speculative_config:",
        f"  decoding_type: {kind}",
        f"  max_draft_len: {about.K}",
        f"  speculative_model: {json.dumps(about.folder)}",
    ]
    if about.kind == "eagle3":
        lines.append(f"  eagle3_layers_to_capture: {list(about.taps)}")
    return "\n".join(lines) + "\n"


def text(about: About) -> str:
    """README.md."""
    lines = [
        f"# {about.name} ({about.kind}) for {ENGINES[about.fmt]}",
        "",
        f"A draft for speculative decoding with the target `{about.target}`, {MARK}",
        "",
        "## Start",
        "",
        "```python" if about.fmt == "transformers" else "```bash",
        launch(about),
        "```",
        "",
        MOVED,
        "",
        *_remarks(about),
        "## Weights",
        "",
        f"{about.tensors} tensors, {about.size:,} bytes.",
        *[f"{part}: {whose}." for part, whose in about.owned.items()],
        *[f"Note: {note}." for note in about.notes],
        "",
        *_expected(about),
    ]
    return "\n".join(lines)


def _vllm(about: About) -> str:
    flags = shlex.quote(json.dumps(speculative_config(about)))
    return f"vllm serve {shlex.quote(about.target)} --speculative-config {flags}"


def _sglang(about: About) -> str:
    steps = f"--speculative-num-steps {about.K} --speculative-eagle-topk 1 --speculative-num-draft-tokens {about.K + 1}"
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(about.target)} --speculative-algorithm {SGLANG[about.kind]} "
        f"--speculative-draft-model-path {shlex.quote(about.folder)} {steps}"
    )


def _trtllm(about: About) -> str:
    return f"trtllm-serve {shlex.quote(about.target)} --config {shlex.quote(about.folder + '/speculative.yaml')}"


def _transformers(about: About) -> str:
    if about.kind != "draft-lm":
        call = f"speculative_decode({about.target!r}, {about.folder!r}, prompt, K={about.K})"
        return f"from draftsmith import speculative_decode\n\nprompt = 'Once upon a time'\nprint({call}.text)"
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"tokenizer = AutoTokenizer.from_pretrained({about.target!r})\n"
        f"target = AutoModelForCausalLM.from_pretrained({about.target!r})\n"
        f"draft = AutoModelForCausalLM.from_pretrained({about.folder!r})\n"
        "inputs = tokenizer('Once upon a time', return_tensors='pt')\n"
        "output = target.generate(**inputs, assistant_model=draft, max_new_tokens=40, do_sample=False)\n"
        "print(tokenizer.decode(output[0]))"
    )


def _remarks(about: About) -> list[str]:
    """What goes wrong most often with this engine."""
    if about.fmt in ("vllm", "speculators"):
        said = "Keep `method`: without it vLLM guesses from the folder's name."
        if about.kind == "draft-lm":
            said += (
                ' At temperatures above 0 add `"draft_sample_method": "probabilistic"`: by default the draft proposes its likeliest'
                " token alone."
            )
        return [said, ""]
    if about.fmt == "sglang":
        return [
            "Steps are tokens drafted; with top-k 1 the draft tokens are one more. With a top-k above 1 the draft is a tree.",
            "",
        ]
    if about.fmt == "trtllm" and about.kind == "eagle3":
        return ["`eagle3_layers_to_capture` of `speculative.yaml` is what counts; ids in config.json are not read.", ""]
    if about.fmt == "transformers" and about.kind != "draft-lm":
        return [
            "transformers' assisted generation takes no heads; this folder is read by Draftsmith's own decoder.",
            "",
        ]
    return ["Draft length and threshold stand in this folder's generation_config.json; batch size is 1.", ""]


def _expected(about: About) -> list[str]:
    entries = about.results["results"] if about.results else []
    if not entries:
        return ["## Expected", "", "This draft was not evaluated (`draftsmith eval-acceptance`)."]
    lines = [
        "## Expected",
        "",
        "Tokens per verify (1 is plain decoding), measured by Draftsmith's decoder on held-out prompts, with 95 % intervals. The",
        "accepted share by position is of all verifies; 1 plus its sum is the mean acceptance length that vLLM reports, but for",
        "verifies that the end of a text cuts short.",
        *["Of a chain as deep as a tree less is accepted."] * any(entry["tree"] != "chain" for entry in entries),
        "",
        "| domain | temperature | drafted | tokens per verify | accepted at position 1, 2, … |",
        "|---|---|---|---|---|",
    ]
    for entry in entries:
        mean = entry["tokens_per_verify"]
        shown = f"{mean['value']:.2f} ({mean['low']:.2f} to {mean['high']:.2f})" if mean else "not measured"
        shares = ", ".join(f"{100 * share['value']:.0f} %" for share in entry["survival"])
        lines.append(f"| {entry['domain']} | {entry['temperature']:g} | {_tried(entry)} | {shown} | {shares} |")
    return [*lines, ""]


def _tried(entry: Mapping[str, Any]) -> str:
    """What was drafted: "chain of 5, sampled"."""
    K, tree = entry["K"], entry["tree"]
    shape = f"chain of {K}" if tree == "chain" else f"{tree}, {K} deep"
    return shape + (f", {entry['drafting']}" if entry["temperature"] > 0 and entry["drafting"] else "")
