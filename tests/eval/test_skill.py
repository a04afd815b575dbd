"""The page that a tuning leaves: engines' flags parse and say what was chosen, the verdict says when not to speculate."""

import copy
import json
import shlex

import pytest
import yaml

from draftsmith.eval.gate import SpeculationGate
from draftsmith.eval.skill import engine_settings, skill_page, verdict


def span(value):
    return {"value": value, "low": value - 0.1, "high": value + 0.1, "count": 8}


def setting(draft, family, speed, K=4, nodes=4, drafting="greedy", **more):
    entry = {
        "draft": draft,
        "family": family,
        "tree": f"{family} of {nodes}",
        "K": K,
        "nodes": nodes,
        "drafting": drafting,
    }
    return entry | {"tokens_per_verify": span(3.0), "speedup_predicted": span(speed)} | more


DYNAMIC = setting("head", "dynamic", 2.2, K=5, nodes=31, width=8, confidence_temperature=1.0)
SHARP = setting("head", "dynamic", 2.4, K=5, nodes=31, width=8, confidence_temperature=0.5)
STATIC = setting("head", "static", 2.5, K=5, nodes=31)
CHAIN = setting("head", "chain", 2.0, drafting="sampled")
LOOKUP = setting("prompt-lookup", "chain", 1.2)
RULES = {"most_temperature": 0.5, "most_batch": 4, "break_even": 0.12, "window": 80, "retry_after": 900}
DOCUMENT = {
    "target": {"path": "models/my target"},
    "workload": {"prompts": {"code": 8}, "prompt_tokens": 40.0, "new_tokens": 48.0},
    "temperature": 0.0,
    "batch": 1,
    "chosen": STATIC | {"speedup": span(2.45), "pays": True},
    "verified": [
        STATIC
        | {
            "predicted_tokens_per_verify": 3.0,
            "measured_tokens_per_verify": span(3.1),
            "tokens_per_verify_error": -0.03,
        }
        | {"speedup": span(2.45), "foreseen": span(2.5), "speedup_error": 0.02}
    ],
    "families": [STATIC, SHARP, DYNAMIC, CHAIN, LOOKUP],
    "by_domain": [{"domain": "code", "tokens_per_verify": span(3.0), "speedup": span(2.4)}],
    "batches": [{"batch": 1, "pays": True, "best": CHAIN} | CHAIN, {"batch": 4, "pays": False, "best": CHAIN} | CHAIN],
    "temperatures": [
        {"temperature": 0.0, "pays": True, "greedy": CHAIN | {"pays": True}} | CHAIN,
        {"temperature": 0.5, "pays": True, "greedy": CHAIN | {"pays": False}} | CHAIN,
    ],
    "costs": {"stated": True, "rows": [{"batch": 1}]},
    "runtime": RULES,
    "drafts": {
        "head": {"kind": "eagle3", "path": "eagle/head", "taps": [1, 3, 4]},
        "prompt-lookup": {"kind": "prompt-lookup", "path": None, "taps": []},
    },
}


def blocks(page, language):
    return [part.split("```")[0] for part in page.split(f"```{language}\n")[1:]]


def test_each_engine_gets_the_best_that_it_can_draft_with_flags_that_parse():
    page = skill_page(DOCUMENT)
    vllm, sglang, trtllm = blocks(page, "bash")
    words = shlex.split(vllm)
    assert words[:3] == ["vllm", "serve", "models/my target"]
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config == {
        "method": "eagle3",
        "num_speculative_tokens": 4,
        "model": "RUN/export/vllm/head",
        "draft_sample_method": "probabilistic",
    }
    flags = shlex.split(sglang.replace("\\\n", " "))
    assert flags[flags.index("--speculative-algorithm") + 1] == "EAGLE3"
    assert flags[flags.index("--speculative-num-steps") + 1] == "5"
    assert flags[flags.index("--speculative-eagle-topk") + 1] == "8"
    assert flags[flags.index("--speculative-num-draft-tokens") + 1] == "32"  # the root is one of them
    assert "--speculative-use-rejection-sampling" not in flags
    [config] = [yaml.safe_load(text)["speculative_config"] for text in blocks(page, "yaml")]
    assert config == {
        "decoding_type": "Eagle3",
        "max_draft_len": 5,
        "speculative_model": "RUN/export/trtllm/head",
        "eagle3_layers_to_capture": [1, 3, 4],
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": 8,
        "max_total_draft_tokens": 31,
    }
    assert shlex.split(trtllm)[0] == "trtllm-serve"


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("eagle1", {"vllm": CHAIN, "sglang": DYNAMIC, "trtllm": LOOKUP}),
        ("medusa", {"vllm": CHAIN, "sglang": LOOKUP, "trtllm": LOOKUP}),
        ("draft-lm", {"vllm": CHAIN, "sglang": CHAIN, "trtllm": CHAIN}),
    ],
)
def test_what_an_engine_lacks_is_not_recommended_to_it(kind, settings):
    document = copy.deepcopy(DOCUMENT)
    document["drafts"]["head"]["kind"] = kind
    assert {engine: engine_settings(document, engine) for engine in settings} == settings


def test_no_method_at_all_is_said():
    document = copy.deepcopy(DOCUMENT)
    document["drafts"]["head"]["kind"] = "medusa"
    document["families"] = [STATIC, CHAIN]
    assert "**TensorRT-LLM**: it has no method" in skill_page(document)


def test_prompt_lookup_needs_no_export_and_has_flags_of_its_own():
    page = skill_page(DOCUMENT | {"families": [LOOKUP]})
    assert "Export first" not in page
    assert json.loads(shlex.split(blocks(page, "bash")[0])[-1]) == {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
    assert "--speculative-algorithm NGRAM" in page
    assert yaml.safe_load(blocks(page, "yaml")[0])["speculative_config"]["decoding_type"] == "NGram"


def test_the_rules_of_the_page_make_the_gate_with_these_thresholds():
    [code] = blocks(skill_page(DOCUMENT), "python")
    line = next(line for line in code.splitlines() if line.startswith("gate = "))
    found = eval(line.removeprefix("gate = "), {"SpeculationGate": SpeculationGate})  # the page's own line
    assert found == SpeculationGate(**RULES)


def test_the_verdict_is_the_measured_speed_or_that_plain_decoding_is_better():
    assert (
        verdict(DOCUMENT) == "**Speculate with head, static of 31: 2.45 (2.35 to 2.55)× measured at batch 1, T = 0.**"
    )
    slow = copy.deepcopy(DOCUMENT)
    slow["chosen"] |= {"pays": False, "speedup": span(0.8)}
    slow["verified"] = []
    assert verdict(slow).startswith("**Decode plainly: no setting pays at batch 1, T = 0.**")
    assert "0.80 (0.70 to 0.90)× predicted" in verdict(slow)
    assert "Plain decoding. The flags below" in skill_page(slow)
