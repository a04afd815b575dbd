"""One JSON row of any known schema -> a text, a conversation, or token ids with their mask.

Knows schemas. Does not know files, tokenizers or templates.
"""

import json
from typing import Any, NamedTuple

from draftsmith.data.documents import Message

# ShareGPT's speakers in the names that chat templates know; other names pass as they are.
SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "observation": "tool"}
SCHEMAS = "messages, conversations, prompt with completion, text, or input_ids"
CONVERSATIONS = ("messages", "conversations")
IDS = ("input_ids", "token_ids")
MASKS = ("loss_mask", "supervised", "assistant_masks")
IGNORED = -100  # a label that is not trained, as in torch and transformers
MAX_ID = 2**31 - 1


class RowError(ValueError):
    """A row that cannot be used. reason: what it is counted under; the message: what is wrong with this one."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Content(NamedTuple):
    """text, or messages with tools, or token_ids with supervised (bool, role: predicted token)."""

    text: str | None = None
    messages: list[Message] | None = None
    tools: list[Any] | None = None
    token_ids: list[int] | None = None
    supervised: list[bool] | None = None


def read_row(row: Any) -> Content:
    """What a row holds; ShareGPT, `messages` and `prompt`/`completion` rows of one chat are equal.

    Message objects stay whole (tool calls, reasoning), without fields that are null. Raises `RowError`.
    """
    if not isinstance(row, dict):
        raise RowError("not an object", f"a {type(row).__name__}, not an object; rows have {SCHEMAS}")
    for key in CONVERSATIONS:
        if row.get(key) is not None:
            return _conversation(row, _turns(row[key], key))
    if row.get("prompt") is not None and row.get("completion") is not None:
        asked, answered = _side(row["prompt"], "prompt", "user"), _side(row["completion"], "completion", "assistant")
        return _conversation(row, asked + answered)
    for key in IDS:
        if row.get(key) is not None:
            return _tokens(row, key)
    if isinstance(row.get("text"), str):
        return Content(text=row["text"])
    if any(key in row for key in CONVERSATIONS):
        return Content(messages=[])
    raise RowError("unknown schema", f"unknown schema with fields {_fields(row)}; rows have {SCHEMAS}")


def _fields(row: dict[Any, Any]) -> str:
    names = sorted(map(str, row))
    return str(names[:8])[:200]


def _conversation(row: dict[str, Any], messages: list[Message]) -> Content:
    tools = row.get("tools")
    if isinstance(tools, str):  # Parquet has no type for schemas of unlike shape: some write them as JSON in a string
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise RowError("malformed tools", "field tools is text that is not JSON; give a list of schemas") from error
    if not isinstance(tools, list | None):
        raise RowError("malformed tools", f"field tools is a {type(tools).__name__}; give a list of schemas")
    if odd := [tool for tool in tools or () if not isinstance(tool, dict)]:
        raise RowError("malformed tools", f"field tools holds a {type(odd[0]).__name__}; a schema is an object")
    system = row.get("system")
    if isinstance(system, str) and system.strip() and not (messages and messages[0]["role"] == "system"):
        messages = [{"role": "system", "content": system}, *messages]
    return Content(messages=messages, tools=tools or None)


def _side(value: Any, key: str, role: str) -> list[Message]:
    return [{"role": role, "content": value}] if isinstance(value, str) else _turns(value, key)


def _turns(turns: Any, key: str) -> list[Message]:
    if not isinstance(turns, list):
        kind = type(turns).__name__
        raise RowError("malformed messages", f"field {key} is a {kind}; it must be a list of messages")
    return [_message(turn, f"{key}[{index}]") for index, turn in enumerate(turns)]


def _message(turn: Any, place: str) -> Message:
    if not isinstance(turn, dict):
        kind = type(turn).__name__
        raise RowError("malformed messages", f"{place} is a {kind}; it must be an object with role and content")
    if turn.get("role") is not None:
        message = {key: value for key, value in turn.items() if value is not None}
        message["content"] = _text_of(turn.get("content"), place)
        _check_calls(message.get("tool_calls"), place)
    elif turn.get("from") is not None:
        message = {"role": turn["from"], "content": _text_of(turn.get("value"), place)}
        message["role"] = SPEAKERS.get(turn["from"], turn["from"]) if isinstance(turn["from"], str) else turn["from"]
    else:
        have = f"unknown schema with fields {_fields(turn)}"
        raise RowError("malformed messages", f"{place}: {have}; it has role and content, or from and value")
    if not isinstance(message["role"], str):
        raise RowError("malformed messages", f"{place}: role must be text, not {type(message['role']).__name__}")
    return message


def _check_calls(calls: Any, place: str) -> None:
    if calls and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise RowError("malformed tool calls", f"{place}: tool_calls must be a list of objects")


def _text_of(content: Any, place: str) -> str | None:
    """The content of a message; its text parts are joined where it is a list of parts."""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        parts = [part.get("text") for part in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else parts
    if not isinstance(content, str | None):
        kind = type(content).__name__
        raise RowError(
            "content is not text", f"{place}: content must be text, not {kind}; images and audio are not read"
        )
    return content


def _tokens(row: dict[str, Any], key: str) -> Content:
    """Token ids with a mask or labels. Tokens whose attention_mask is 0 are padding and are left out."""
    ids = row[key]
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token <= MAX_ID for token in ids):
        raise RowError("malformed token ids", f"field {key} must be a list of token ids, whole numbers from 0")
    supervised = [True] * len(ids)
    for mask in MASKS:
        if row.get(mask) is not None:
            supervised = _flags(row[mask], mask, len(ids))
    if row.get("labels") is not None:
        supervised = _labelled(row["labels"], ids)
    if row.get("attention_mask") is not None:
        real = _flags(row["attention_mask"], "attention_mask", len(ids))
        ids, supervised = ([v for v, kept in zip(part, real, strict=True) if kept] for part in (ids, supervised))
    return Content(token_ids=ids, supervised=supervised)


def _flags(mask: Any, name: str, length: int) -> list[bool]:
    if not isinstance(mask, list) or len(mask) != length or not all(flag in (0, 1) for flag in mask):
        raise RowError("malformed mask", f"field {name} must be {length} numbers 0 or 1, one for each token id")
    return [bool(flag) for flag in mask]


def _labelled(labels: Any, ids: list[int]) -> list[bool]:
    """Labels stand at the token they name, as in transformers; shifted or edited ones would train another text."""
    if not isinstance(labels, list) or len(labels) != len(ids):
        raise RowError("malformed mask", f"field labels must be {len(ids)} numbers, one for each token id")
    if any(label != IGNORED and label != token for label, token in zip(labels, ids, strict=True)):
        raise RowError("labels are other tokens", f"field labels must repeat the token ids (unshifted) or be {IGNORED}")
    return [label != IGNORED for label in labels]
