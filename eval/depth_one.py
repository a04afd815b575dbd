"""Does the decoder accept what training says it should? The first drafted token, three ways, on the same places of the same text.

Trained (the trainer's own held-out measurement) and teacher-forced are of the same rows; teacher-forced and decoded are of the
same places of the same answers. So no sampling noise lies between the two sides of a comparison, only rounding, and a difference
means that something else is fed to the draft on one side. Knows drafters and decoded answers; reads no files.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from draftsmith.eval.decode import Decoded
from draftsmith.eval.drafters import Drafter
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.teacher_forced import Text, acceptance_at, can_be_forced
from draftsmith.models.target import Target

LIMIT = 0.03  # of the share of matches
#: In half precision a few near-ties fall the other way; so many more on one side than on the other, by chance: below 1 in 250.
FEWEST = 8
CHECKLIST = (
    "the head's taps (config.json) are the blocks whose outputs it was trained on, counted from 0; one layer off is enough",
    "the last state is the one after the final norm, taps are those before any norm",
    "slots: a head joins the target's state of t with token t + 1 and predicts t + 2; a draft LM predicts t + 1",
    "the target is the one of the cache (fingerprint), in the same dtype, and the draft's weights are those that were kept",
    "rows and prompts come from the same tokenizer and chat template",
    "RoPE settings of the head equal the target's",
    "a decoder of your own: rejected tokens have left the draft's cache, and its own states have been replaced by the target's",
)


def on_answers(target: Target, drafter: Drafter, answers: Sequence[Decoded]) -> dict[str, int]:
    """Greedy answers: in how many verifies the first drafted token stayed (`decoded`), at how many of the same places it would by
    teacher forcing (`teacher_forced`), and in how many one was drafted (`positions`). {} for what cannot be forced."""
    if not can_be_forced(drafter):
        return {}
    decoded = forced = positions = 0
    for answer in answers:
        ids = [*answer.prompt, *answer.tokens]
        drafted = np.zeros(len(ids), dtype=bool)
        place = len(answer.prompt)
        for verify in answer.trace:
            drafted[place] = bool(verify.hits)
            decoded += bool(verify.hits) and verify.hits[0]
            place += verify.emitted
        found = acceptance_at(target, drafter, ids, drafted, [Sampler(0.0)], 1)[0, 0]
        forced += int(np.nansum(found))
        positions += int(drafted.sum())
    return {"decoded": int(decoded), "teacher_forced": forced, "positions": positions}


def on_texts(target: Target, drafter: Drafter, texts: Sequence[Text]) -> dict[str, int]:
    """Supervised tokens of these rows: at how many the draft's likeliest is the target's, and how many there are."""
    rows = [acceptance_at(target, drafter, t.token_ids, t.supervised, [Sampler(0.0)], 1)[0, 0] for t in texts]
    return {
        "teacher_forced": int(sum(np.nansum(row) for row in rows)),
        "positions": int(sum((~np.isnan(row)).sum() for row in rows)),
    }


def verdict(names: tuple[str, str], first: float, second: float, positions: int) -> dict[str, Any]:
    """One comparison of two shares of the same positions, as the results hold it."""
    difference = second - first
    differ = abs(difference) >= LIMIT and round(abs(difference) * positions) >= FEWEST
    return {names[0]: first, names[1]: second, "difference": difference, "positions": positions, "ok": not differ}


def depth_one(
    results: Sequence[dict[str, Any]], trained: float | None, held_out: dict[str, int] | None
) -> dict[str, dict[str, Any]]:
    """The comparisons that can be made. results: entries with the sums of `on_answers`; trained: the trainer's share of matches on
    the rows of which `held_out` has the sums (`on_texts`)."""
    made: dict[str, dict[str, Any]] = {}
    if trained is not None and held_out is not None and held_out["positions"]:
        share = held_out["teacher_forced"] / held_out["positions"]
        made["held_out"] = verdict(("trained", "teacher_forced"), trained, share, held_out["positions"])
    sums = [entry["depth_one"] for entry in results if entry.get("depth_one")]
    if positions := sum(entry["positions"] for entry in sums):
        forced, decoded = (sum(e[name] for e in sums) / positions for name in ("teacher_forced", "decoded"))
        made["answers"] = verdict(("teacher_forced", "decoded"), forced, decoded, positions)
    return made
