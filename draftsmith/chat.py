"""A chat at the terminal that shows speculation at work: accepted tokens coloured by depth, tokens per verify after each answer.

Knows the terminal; the decoding is `speculative_decode`'s own. A model without a chat template continues the text instead.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from draftsmith.errors import UserError
from draftsmith.eval.decode import Decoded, as_drafter, as_target, prompt_ids, speculative_decode
from draftsmith.eval.sample import Stream
from draftsmith.eval.tree import Shape
from draftsmith.models.target import Target

#: By depth: the first drafted token of a verify, the second, … ; the target's own token is plain.
DEPTH_STYLES = ("green3", "chartreuse3", "gold3", "orange3", "dark_orange", "red3")


def answer(
    target: Target, drafter: Any, prompt: Any, console: Console, *, K: int, tree: Shape | None, **options: Any
) -> Decoded:
    """Decode one answer, streaming it: tokens that were drafted and accepted are coloured by their depth."""
    stream = Stream(target.tokenizer)

    def show(_prompt: int, tokens: list[int], accepted: int) -> None:
        for place, token in enumerate(tokens):
            style = DEPTH_STYLES[min(place, len(DEPTH_STYLES) - 1)] if place < accepted else ""
            console.print(Text(stream.piece(token), style=style), end="", soft_wrap=True)

    started = time.perf_counter()
    result = speculative_decode(target, drafter, prompt, K, tree=tree, on_tokens=show, **options)
    seconds = time.perf_counter() - started
    console.print(Text(stream.rest()), end="", soft_wrap=True)
    verifies = len(result.trace)
    note = "" if result.lossless else " · LOSSY acceptance"
    console.print(
        f"\n[dim]{len(result.tokens) / verifies:.2f} tokens/verify · {len(result.tokens)} tokens in {verifies} verifies · "
        f"{len(result.tokens) / seconds:.1f} tokens/s{note}[/dim]",
        highlight=False,
    )
    return result


def chat(
    target_path: str,
    draft_path: str | None,
    lines: Callable[[], Iterator[str]],
    console: Console,
    *,
    K: int,
    tree: Shape | None = None,
    **options: Any,
) -> None:
    """Answer one line after another until the input ends. Messages so far go with each if the tokenizer has a chat template.

    A line that cannot be answered, such as one beyond the target's context, is refused and forgotten.
    """
    target = as_target(target_path)
    drafter = as_drafter(draft_path, target)
    messages: list[dict[str, str]] = []
    templated = bool(target.tokenizer.chat_template)
    for line in lines():
        if not line.strip():
            continue
        asked = [*messages, {"role": "user", "content": line}]
        if templated:
            room = target.context - options["max_new_tokens"] - K
            while len(asked) > 1 and len(prompt_ids(target, asked)) > room:
                del asked[:2]  # the oldest question and answer make room
        prompt: Any = asked if templated else line
        try:
            result = answer(target, drafter, prompt, console, K=K, tree=tree, **options)
        except UserError as error:
            console.print(Text(f"draftsmith: {error}"), soft_wrap=True)
            continue
        text = target.tokenizer.decode(result.tokens, skip_special_tokens=True)
        messages = [*asked, {"role": "assistant", "content": text}]
