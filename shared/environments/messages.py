"""Chat messages between verifiers' models and OpenAI's plain form, which is what travels."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rollstream.shared.records import Message

if TYPE_CHECKING:
    from verifiers.legacy.types import Messages

_RESPONSE_ONLY = {"finish_reason", "is_truncated", "tokens"}
"""What verifiers' ResponseMessage has beyond a message."""


def to_openai(messages: str | Sequence[Any]) -> list[Message]:
    """verifiers' messages (models, dicts or one bare string) as plain dicts without null fields."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    return [_plain(message) for message in messages]


def from_openai(messages: Sequence[Message]) -> Messages:
    """Plain dicts as verifiers' models, which its own reward functions insist on."""
    from verifiers.legacy.utils.message_utils import normalize_messages

    return normalize_messages([copy.deepcopy(message) for message in messages])


def _plain(message: Any) -> Message:
    if hasattr(message, "model_dump"):
        fields = message.model_dump(mode="json", exclude_none=True, exclude=_RESPONSE_ONLY)
    else:
        fields = {key: value for key, value in message.items() if value is not None}
    if fields.get("role") == "text":  # verifiers' role for a bare string
        fields["role"] = "user"
    plain: Message = {"role": fields.pop("role"), "content": fields.pop("content", None), **fields}
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    return plain


def _plain_call(call: dict[str, Any]) -> dict[str, Any]:
    if "function" in call:
        return call
    function = {"name": call["name"], "arguments": call["arguments"]}
    return {"id": call["id"], "type": "function", "function": function}
