"""The peers' trained heads as heads of ours, so that one decoder measures all; each is checked against its own code's logits.

Knows files; knows nothing of decoding.
"""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.models.eagle import EagleHead
from draftsmith.models.serving.importing import import_draft
from draftsmith.models.target import Target
from draftsmith.train.rollout import rollout

SAME = 1e-4  # largest difference of a logit between the peer's code and ours


def imported(folder: Path, target: Target) -> EagleHead:
    """The head that a peer has saved in `folder`/head. Raises UserError for what cannot be a head of ours."""
    out = folder / "ours"
    shutil.rmtree(out, ignore_errors=True)
    import_draft(folder / "head", target, out)
    return EagleHead.load(out, target)


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
