"""Decode prompts in vLLM with one draft after the other. Runs in the environment of `serving_env`, which has no Draftsmith.

`python serving_engine.py JOB OUT`: JOB holds the target's folder, prompts, the cap on new tokens and the cases (a key, a name and
vLLM's `speculative_config`); OUT gets one JSON line per case: its tokens, and for each prompt what every verify drafted and
accepted. A draft that the engine refuses ends the process with the engine's own error. Knows vLLM, and not what is expected.
"""

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: no start-up of a second one for every case
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def decode(job: dict[str, Any], speculation: dict[str, Any] | None) -> dict[str, Any]:
    """Greedy tokens, and [drafted, accepted] of every verify of each prompt, with a fresh engine."""
    from vllm import LLM, SamplingParams

    started = time.monotonic()
    # Cached prefixes would give a draft states that belong to another prompt's continuation.
    llm = LLM(
        model=job["target"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=job["context"],
        max_num_seqs=16,
        max_num_batched_tokens=max(1024, job["context"]),
        enable_prefix_caching=False,
        disable_log_stats=False,
        per_request_spec_decode_metrics="detailed",
        seed=0,
        speculative_config=speculation,
    )
    ready = time.monotonic()
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in job["prompts"]],
        SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"]),
        use_tqdm=False,
    )
    decoded = time.monotonic()
    steps = []
    for output in outputs:
        found = output.outputs[0].spec_decode_metrics
        pairs = [] if found is None else zip(found.per_step_drafted, found.per_step_accepted, strict=True)
        steps.append([[int(drafted), int(accepted)] for drafted, accepted in pairs])
    counters = {
        metric.name.split("spec_decode_")[1]: getattr(metric, "values", None) or getattr(metric, "value", None)
        for metric in llm.get_metrics()
        if "spec_decode" in metric.name
    }
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    seconds = {"start": round(ready - started, 1), "decode": round(decoded - ready, 1)}
    return {"tokens": tokens, "steps": steps, "counters": counters, "seconds": seconds}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with Path(sys.argv[2]).open("a", encoding="utf-8") as out:
        for case in job["cases"]:
            found = decode(job, case["speculation"])
            gc.collect()
            out.write(json.dumps({"key": case["key"], "name": case["name"], **found}) + "\n")
            out.flush()
            print(case["name"], found["counters"], found["seconds"], flush=True)


if __name__ == "__main__":
    main()
