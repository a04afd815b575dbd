"""What an evaluation can be told. Kept apart from the code that decodes, so that a config is read and checked without torch."""

from typing import Annotated, Literal

from pydantic import Field

from draftsmith.settings import SEEDS, Settings


class EvalSettings(Settings):
    """What is decoded, and how.

    drafts: names of built-in drafts and of `eagle`; domains: of the held-out rows (null: all that there are); temperatures: each
    is measured by itself, 0 is greedy; K: tokens drafted per verify; drafting: above 0 the draft's tokens are
    sampled, or its likeliest ones (greedy), or both are measured; top_k, top_p: cut the distribution that is sampled (null: not).
    questions: a JSONL file of prompts in place of the held-out rows (docs/evaluation.md); template: its conversations go through
    the target's chat template (target), or are joined as plain text (none).
    prompts: per domain; prompt_tokens: how much of a held-out text is given; max_new_tokens: generated for each prompt at most;
    batch: prompts decoded at once (the result does not depend on it); timed_prompts: per domain, decoded one at a time for the
    speed-up (0: not measured), plainly and with the draft in turn, two rounds; no new one is begun after timed_seconds, but two are
    timed in any case. held_out_rows: texts per domain for alpha_teacher_forced (0: not measured); seed: of the random streams.
    """

    drafts: tuple[str, ...] = Field(("untrained", "distilled", "prompt-lookup", "oracle"), min_length=1)
    domains: tuple[str, ...] | None = None
    temperatures: tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...] = Field((0.0, 1.0), min_length=1)
    K: int = Field(5, ge=1)
    drafting: Literal["sampled", "greedy", "both"] = "sampled"
    top_k: int | None = Field(None, ge=1)
    top_p: float | None = Field(None, gt=0, le=1)
    questions: str | None = None
    template: Literal["target", "none"] = "target"
    prompts: int = Field(16, ge=1)
    prompt_tokens: int = Field(48, ge=1)
    max_new_tokens: int = Field(48, ge=1)
    batch: int = Field(16, ge=1)
    timed_prompts: int = Field(8, ge=0)
    timed_seconds: float = Field(3.0, ge=0)
    held_out_rows: int = Field(8, ge=0)
    seed: int = Field(0, ge=0, lt=SEEDS)

    def rounds(self) -> list[tuple[float, "EvalSettings"]]:
        """What is measured one after another: a temperature, and these settings with one way of drafting (at 0 there is one)."""
        both = ("sampled", "greedy") if self.drafting == "both" else (self.drafting,)
        return [
            (temperature, self.model_copy(update={"drafting": drafting}))
            for temperature in self.temperatures
            for drafting in (both if temperature else ("greedy",))
        ]
