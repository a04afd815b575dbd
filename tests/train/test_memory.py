"""What a training holds in memory: the counts per slot against the tensors that autograd saves."""

import pytest
import torch
from kit import TAPS, tiny_config, tiny_target
from transformers import AutoModelForCausalLM, GPT2Config, Qwen3Config

from draftsmith.data.batches import Batch, TopK
from draftsmith.data.cache.manifest import CacheSettings
from draftsmith.models.draft import DraftLM
from draftsmith.models.eagle import new_eagle_head
from draftsmith.models.medusa import new_medusa_heads
from draftsmith.models.target import Target
from draftsmith.models.vocabulary import DraftVocabulary
from draftsmith.train.memory import Run, training_memory
from draftsmith.train.objectives import DraftLMObjective, EagleObjective, MedusaObjective, Objective
from draftsmith.train.optim import training_bytes
from draftsmith.train.settings import DistillSettings, EagleTrainSettings, OnPolicySettings
from draftsmith.train.teachers import frozen_head

ROWS = 2
CACHE = CacheSettings(distribution="topk", k=8, taps=TAPS, last=True)


def batch(target: Target, length: int) -> Batch:
    ids = torch.randint(0, target.vocabulary, (ROWS, length), generator=torch.Generator().manual_seed(0))
    teacher = TopK(torch.arange(8).expand(ROWS, length, 8), torch.full((ROWS, length, 8), -3.0))
    states = torch.randn(ROWS, length, 3, target.width)
    supervised, lengths = torch.ones(ROWS, length, dtype=torch.bool), torch.full((ROWS,), length)
    return Batch(ids, supervised, lengths, taps=states, last=states[:, :, 0].clone(), teacher=teacher)


def saved_bytes(objective: Objective, given: Batch) -> int:
    """Bytes of all storages that the graph keeps for its way back, weights and the batch's own aside."""
    others = [*objective.parameters(), *objective.buffers(), given.taps, given.last]
    seen = {tensor.untyped_storage().data_ptr(): 0 for tensor in others}
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)  # alive, so that no other storage gets its address
        seen.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        return tensor

    objective.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        objective(given)
    return sum(seen.values())


def predicted(run: Run) -> int:
    terms = {term.name: term.bytes for moment in training_memory(run).moments.values() for term in moment}
    steps = run.columns[2]
    gradients = terms.get("head's gradients", 0) * steps // (steps + 1)  # the last of them is made on the way back
    return terms["activations"] + terms["head's states"] + gradients


def measure(objective: Objective, run: Run) -> float:
    assert run.slots == ROWS * run.longest
    return predicted(run) / saved_bytes(objective, batch(run.target, run.longest))


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
@pytest.mark.parametrize(("rollouts", "layers", "length"), [(1, 1, 24), (3, 2, 24), (2, 1, 300)])
def test_what_a_rollout_keeps_is_what_the_formula_says(kind, rollouts, layers, length):
    target = tiny_target()
    own = DraftVocabulary(torch.arange(100), target.vocabulary)
    own = own if kind == "eagle3" else DraftVocabulary.all_of(target.vocabulary)
    head = new_eagle_head(target, TAPS, own, kind=kind, layers=layers)
    objective = EagleObjective(head, rollouts, target_head=frozen_head(target))
    settings = EagleTrainSettings(kind=kind, rollouts=rollouts, layers=layers, batch_tokens=ROWS * length)
    assert measure(objective, Run(head, target, settings, CACHE, length)) == pytest.approx(1.0, abs=0.06)


def test_what_medusa_heads_keep_is_what_the_formula_says():
    target = tiny_target()
    heads = new_medusa_heads(target, DraftVocabulary.all_of(target.vocabulary), 3)
    settings = EagleTrainSettings(kind="medusa", rollouts=3, batch_tokens=ROWS * 64)
    objective = MedusaObjective(heads, target_head=frozen_head(target))
    assert measure(objective, Run(heads, target, settings, CACHE, 64)) == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2"])
def test_what_a_draft_lm_keeps_is_what_the_formula_says(architecture):
    """Qwen 3 norms queries and keys; GPT-2 drops out attention, for which its scores are kept."""
    sizes = {"vocab_size": 150, "bos_token_id": 0, "eos_token_id": 0}
    body = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8}
    config = {
        "llama": tiny_config(),
        "qwen3": Qwen3Config(**sizes, **body, num_key_value_heads=2),
        "gpt2": GPT2Config(**sizes, n_embd=32, n_layer=4, n_head=4, n_positions=256),
    }[architecture]
    target = Target(AutoModelForCausalLM.from_config(config).requires_grad_(False))
    draft = DraftLM.from_target_blocks(target, [0, 3])
    draft.model.requires_grad_(True)
    run = Run(draft.model, target, DistillSettings(batch_tokens=ROWS * 200), CACHE, 200)
    assert measure(DraftLMObjective(draft), run) == pytest.approx(1.0, abs=0.1)


def test_the_total_is_what_is_held_and_the_largest_moment():
    target = tiny_target()
    draft = DraftLM.from_target_blocks(target, [0, 3]).model.requires_grad_(True)
    plain = Run(draft, target, DistillSettings(), CACHE, 64)
    memory = training_memory(plain, process=10)
    sums = [sum(term.bytes for term in moment) for moment in memory.moments.values()]
    assert memory.total == sum(term.bytes for term in memory.held) + max(sums)
    terms = {term.name: term.bytes for term in memory.held}
    assert terms["process"] == 10
    assert terms["weights"] + terms["optimiser"] + memory.moments["update"][0].bytes == training_bytes(draft)
    on_policy = Run(draft, target, DistillSettings(on_policy=OnPolicySettings()), CACHE, 64)
    writer = 4 * sum(parameter.numel() for parameter in draft.parameters())
    assert training_memory(on_policy, process=10).total == memory.total + writer
    double = training_memory(Run(draft, target, DistillSettings(accumulate=2), CACHE, 64))
    assert {t.name: t.bytes for t in double.held}["batch"] == 2 * terms["batch"]
