"""What an evaluation can be told. Kept apart from the code that decodes, so that a config is read and checked without torch."""

import os
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from draftsmith.errors import UserError
from draftsmith.settings import SEEDS, Settings

MOST_NODES = 4096  # of a tree that anybody would verify


def is_folder(draft: str) -> bool:
    """Whether a draft is given as a folder and not by name: with a slash."""
    return "/" in draft


def result_name(draft: str) -> str:
    """What a draft's results are called: its name, or its folder's."""
    return _absolute(draft).name if is_folder(draft) else draft


def checked_folder(draft: str, place: str) -> Path:
    """The folder that a draft is given as, absolute. Raises UserError, with `place` as the field, where there is none."""
    folder = _absolute(draft)
    if not os.path.exists(folder / "config.json"):  # pathlib's raises for a name too long
        raise UserError(
            f"{place} {draft}: no folder of a draft (it has no config.json); name one such as `import` writes"
        )
    return folder


def _absolute(draft: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(draft)))  # a link keeps its own name


class EvalSettings(Settings):
    """What is decoded, and how.

    drafts: names of built-in drafts and of `eagle`, and folders (with a slash) of heads or LMs for this target; domains: of the
    held-out rows (null: all that there are); temperatures: each is measured by itself, 0 is greedy; K: tokens drafted per verify,
    and the depth of a tree; tree: chain; static (a fixed shape of `tree_nodes` nodes); dynamic (EAGLE-2's, with `tree_width`
    nodes per level); optimal (the best fixed shape for the acceptance measured on a quarter of a domain's prompts); or the parent
    of each node (the root, -1, first); min_confidence: a chain ends before a token that the draft expects to be accepted with a
    lower probability. drafting: at a temperature above 0 the draft's tokens are sampled, or its likeliest ones (greedy), or both
    are measured; top_k, top_p: cut the distribution that is sampled (null: not).
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
    tree: Literal["chain", "static", "dynamic", "optimal"] | tuple[int, ...] = "chain"
    tree_nodes: int = Field(32, ge=1, le=MOST_NODES)
    tree_width: int = Field(8, ge=1)
    min_confidence: float = Field(0.0, ge=0, le=1)
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

    @model_validator(mode="after")
    def _tree_is_possible(self) -> Self:
        if self.min_confidence and self.tree != "chain":
            raise ValueError("min_confidence: only chains end early; set it to 0 or tree to chain")
        if isinstance(self.tree, tuple):
            depths: list[int] = []
            for node, parent in enumerate(self.tree):
                if not (parent == -1 if node == 0 else 0 <= parent < node):
                    raise ValueError(f"tree: node {node} has parent {parent}; write -1 for node 0, then earlier nodes")
                depths.append(0 if node == 0 else depths[parent] + 1)
            if max(depths, default=0) != self.K:
                raise ValueError(f"tree: its depth is {max(depths, default=0)} and K is {self.K}; make them equal")
        elif self.tree != "chain":
            most = sum(min(self.tree_width**depth, MOST_NODES) for depth in range(1, self.K + 1))
            if self.tree == "dynamic":
                most = self.tree_width + (self.K - 1) * self.tree_width**2
            if not self.K <= self.tree_nodes <= most:
                raise ValueError(
                    f"tree_nodes: {self.tree_nodes} of width {self.tree_width} and depth K {self.K} is no tree; "
                    f"{self.K} to {most} are possible"
                )
        return self

    @property
    def tree_name(self) -> str:
        """What results call the tree: chain, or its kind and how many nodes are drafted."""
        if isinstance(self.tree, tuple):
            return f"parents-{len(self.tree) - 1}"
        return self.tree if self.tree == "chain" else f"{self.tree}-{self.tree_nodes}"
