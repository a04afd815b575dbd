"""What the tuner can be told. Kept apart from the code that measures, so that a config is read and checked without torch."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from draftsmith.settings import Settings

Milliseconds = Annotated[float, Field(gt=0)]


class StatedCosts(Settings):
    """What one machine takes for one batch size, stated instead of measured: a laptop can plan for a cluster.

    batch: sequences decoded together; target_step_ms: one step of plain decoding of all of them; draft_step_ms: one forward of the
    draft; verify_ms: of the target's forward over so many tokens of each sequence, the pending one included, by their number
    (others are interpolated, none beyond the largest); overhead_ms: of the engine, once per verify.
    """

    batch: int = Field(1, ge=1)
    target_step_ms: Milliseconds
    draft_step_ms: float = Field(ge=0)
    verify_ms: dict[Annotated[int, Field(ge=1)], Milliseconds] = Field(min_length=1)
    overhead_ms: float = Field(0.0, ge=0)


class TuneSettings(Settings):
    """What is tried, and how often it is measured.

    The prompts, their length, how much is generated, the domains and drafts are those of `evaluation`; the yardsticks `untrained`
    and `oracle` are left out. temperature: the one to choose for; temperatures: others up to which speculation may pay (the gate is
    one of these); K: the longest chain; depth: of the deepest tree; budgets: drafted nodes of a tree; widths: children of a dynamic
    tree's node; confidence_temperatures: of dynamic trees (engines have 1 alone); batches: sequences decoded together, the first is
    the one to choose for. prompts: per domain; repetitions: of each timing, in turn; verified: how many of the best settings are
    decoded for real, on timed_prompts prompts. costs: of another machine, instead of timing this one; one entry per batch size.
    """

    temperature: float = Field(0.0, ge=0)
    temperatures: tuple[Annotated[float, Field(ge=0)], ...] = Field((0.0, 0.5, 1.0, 1.5), min_length=1)
    K: int = Field(8, ge=1)
    depth: int = Field(6, ge=1)
    budgets: tuple[Annotated[int, Field(ge=1)], ...] = (15, 31, 63)
    widths: tuple[Annotated[int, Field(ge=1)], ...] = (4, 8)
    confidence_temperatures: tuple[Annotated[float, Field(gt=0)], ...] = (1.0,)
    batches: tuple[Annotated[int, Field(ge=1)], ...] = Field((1, 4, 16), min_length=1)
    prompts: int = Field(8, ge=1)
    repetitions: int = Field(3, ge=1)
    verified: int = Field(3, ge=0)
    timed_prompts: int = Field(6, ge=1)
    costs: tuple[StatedCosts, ...] = ()

    @model_validator(mode="after")
    def _one_entry_per_batch(self) -> Self:
        stated = [entry.batch for entry in self.costs]
        if len(set(stated)) < len(stated):
            raise ValueError(f"costs: batch {max(stated, key=stated.count)} is stated twice; keep one entry")
        if stated and self.batches[0] not in stated:
            raise ValueError(f"costs: none is stated for batch {self.batches[0]}, the first of batches; add it")
        return self
