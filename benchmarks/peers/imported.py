"""The peers' trained heads as heads of ours, so that one decoder measures all; each is checked against its own code's logits.

speculators' defaults hold three things that `EagleHead` has no name for or another: one norm over all taps before they are fused,
the normed feature as the residual, and the normed state fed back (`norm_state`). Knows files; knows nothing of decoding.
"""

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from draftsmith.errors import UserError
from draftsmith.models.eagle import Attend, EagleConfig, EagleHead, EagleLayer, RMSNorm
from draftsmith.models.target import Target
from draftsmith.models.vocabulary import DraftVocabulary
from draftsmith.train.rollout import rollout

SAME = 1e-4  # largest difference of a logit between the peer's code and ours


class NormedResidual(EagleLayer):
    """EAGLE-3's first layer with the normed feature as residual: speculators' `norm_before_residual`."""

    def forward(self, embedding: Tensor, x: Tensor, rope: tuple[Tensor, Tensor], layer: int, attend: Attend) -> Tensor:
        assert self.hidden_norm is not None
        feature = self.hidden_norm(x)
        x = feature + self.self_attn(torch.cat([self.input_layernorm(embedding), feature], dim=-1), rope, layer, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class SpeculatorsHead(EagleHead):
    """A head of speculators' EAGLE-3 defaults."""

    def __init__(self, config: EagleConfig, vocabulary: DraftVocabulary, target: Target) -> None:
        super().__init__(replace(config, norm_state=True), vocabulary, target)
        self.input_norm = RMSNorm(len(config.taps) * config.target_width, config.norm_eps)
        self.layers = nn.ModuleList([NormedResidual(config, first=True)])

    def fuse(self, features: Tensor) -> Tensor:
        return self.fc(self.input_norm(features.flatten(2)))


HEADS: dict[str, type[EagleHead]] = {"speculators": SpeculatorsHead, "specforge": EagleHead}


def imported(peer: str, folder: Path, config: EagleConfig, target: Target) -> EagleHead:
    """The head that `peer` has saved in `folder`. config: of our head, whose sizes it was trained with.

    Raises UserError where a tensor is missing, extra, of another shape, or the embedding is not the target's.
    """
    [file] = folder.glob("model*.safetensors")
    tensors = load_file(file)
    embedding = tensors.pop("embed_tokens.weight", None)
    own = target.model.get_input_embeddings().weight
    if embedding is not None and not torch.equal(embedding.to(own.dtype), own):
        raise UserError(f"{file}: its embedding is not the target's")
    d2t = tensors.pop("d2t", torch.zeros(target.vocabulary, dtype=torch.long))  # speculators writes none of a whole one
    tensors.pop("t2d", None)
    head = HEADS[peer](config, DraftVocabulary(d2t + torch.arange(len(d2t)), target.vocabulary), target)
    renamed = {name.replace("midlayer.", "layers.0.", 1): tensor.float() for name, tensor in tensors.items()}
    expected = {name: value.shape for name, value in head.state_dict().items()}
    found = {name: value.shape for name, value in renamed.items()}
    if expected != found:
        wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        raise UserError(f"{file}: missing, extra or of another shape: {', '.join(wrong)}")
    head.load_state_dict(renamed)
    return head.requires_grad_(False).eval()


@torch.no_grad()
def difference(head: EagleHead, folder: Path, states: dict[str, Tensor]) -> float:
    """Largest difference between the logits of probe.safetensors, which the peer's own code computed for a row, and the head's.

    At rollout step k a row of T tokens has T − 1 − k slots whose token is the text's own: both sides agree on what these join.
    """
    probe = load_file(folder / "probe.safetensors")
    start, end = states["offsets"][int(probe["row"]) :][:2].tolist()
    ids, taps = states["token_ids"][start:end], states["taps"][start:end].float()
    steps, worst = probe["logits"], 0.0
    for k, state in enumerate(rollout(head, ids[None], taps[None], len(steps))):
        slots = len(ids) - 1 - k
        worst = max(worst, float((head.logits(state)[0, :slots] - steps[k, :slots]).abs().max()))
    return worst


def check(head: EagleHead, folder: Path, states: dict[str, Tensor]) -> float:
    """`difference`. Raises UserError where it is more than `SAME`: then no number of this head means anything."""
    if not (found := difference(head, folder, states)) <= SAME:
        raise UserError(
            f"{folder}: as a head of ours its logits differ by {found:.2g} from those of the peer's own code"
        )
    return found
