"""A short text with the depth at which each of its tokens was drafted: what a reader looks at before any number.

Knows a tokenizer and one decoded prompt; what a depth looks like on a page or a terminal is somebody else's.
"""

import itertools
from typing import Any

from draftsmith.eval.decode import Decoded

PROMPT_TOKENS = 24  # of the prompt's end: enough to see what is being continued
NEW_TOKENS = 96


class Stream:
    """Turns token ids into pieces of text as they become complete characters."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = ""

    def piece(self, token: int) -> str:
        """What this token adds to the text; held back while a character is incomplete."""
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        return "" if text.endswith("\ufffd") else self._beyond(text)

    def rest(self) -> str:
        """What is still held back, at the end of an answer."""
        return self._beyond(self._tokenizer.decode(self._tokens, skip_special_tokens=True))

    def _beyond(self, text: str) -> str:
        """What `text` has beyond what it shares with the text so far: what is printed cannot be taken back."""
        pairs = zip(self._shown, text, strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._shown = text
        return text[shared:]


def depths(decoded: Decoded) -> list[int]:
    """For each new token the position k ≥ 1 at which it was drafted and accepted, or 0 for the target's own token."""
    return [place + 1 if place < verify.accepted else 0 for verify in decoded.trace for place in range(verify.emitted)]


def sample(decoded: Decoded, tokenizer: Any) -> dict[str, Any]:
    """`prompt`: the end of the prompt as text; `pieces`: [text, depth] of the first `NEW_TOKENS` new tokens.

    A token that completes no character shows with the one that does.
    """
    stream = Stream(tokenizer)
    pairs = list(zip(decoded.tokens, depths(decoded), strict=True))[:NEW_TOKENS]
    pieces = [[text, depth] for token, depth in pairs if (text := stream.piece(token))]
    return {"prompt": tokenizer.decode(decoded.prompt[-PROMPT_TOKENS:], skip_special_tokens=True), "pieces": pieces}
