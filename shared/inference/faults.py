"""What a server's refusals mean, and what one of them teaches for the next request."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import msgspec
import structlog

from rollstream.shared.inference.types import ContextOverflow, InferenceError

log = structlog.get_logger(__name__)

_WORDS_CHARS = 500
_OVERFLOW = re.compile(
    r"context.?(length|window|size)|maximum model length|max_model_len"
    r"|(prompt|input|messages)\b.{0,60}\btoo long"
    # vLLM's answer to a prompt that fills the context to the last token.
    r"|max_tokens must be at least 1, got 0",
    re.IGNORECASE | re.DOTALL,
)
_UNSUPPORTED = re.compile(
    r"unsupported|not? support|unrecogni[sz]ed|unknown|unexpected|only the default"
    r"|not (permitted|allowed|accepted)|deprecated|extra (inputs|fields)",
    re.IGNORECASE,
)
_DROPPABLE = ("temperature", "seed")


class DeadlinePassed(InferenceError):
    """The caller's deadline passed, or would before an answer can come: no time to ask again."""


class Busy(InferenceError):
    """The server is over its limit and, where it says so, asks for some seconds of patience."""

    def __init__(self, message: str, *, status: int, retry_after_s: float) -> None:
        super().__init__(message, status=status, retryable=True)
        self.retry_after_s = retry_after_s


def error_from(
    status: int, body: bytes, url: str, retry_after: str | None = None
) -> InferenceError:
    """A server's error answer as the exception to raise, with the server's own words.

    Retryable are 408, 429 (unless a quota is used up) and 5xx but 501; `retry_after` is the header.
    """
    words, code = _words(body)
    message = f"{url} answered {status}: {words}"
    if status in (400, 413) and (_OVERFLOW.search(words) or "context_length" in code):
        return ContextOverflow(message, status=status)
    retryable = status in (408, 429) or (status >= 500 and status != 501)
    if code == "insufficient_quota":
        retryable = False
    if retryable and retry_after and retry_after.isdigit():
        return Busy(message, status=status, retry_after_s=float(retry_after))
    return InferenceError(message, status=status, retryable=retryable)


def error_within_200(body: bytes) -> int | None:
    """The status of an error that a gateway sent as 200, or None where it is an answer.

    OpenRouter does so where the model behind it failed: `{"error": {"code": 502, ...}}`.
    """
    if not body.lstrip().startswith(b'{"error"'):
        return None
    answer: Any = None
    with contextlib.suppress(msgspec.DecodeError):
        answer = msgspec.json.decode(body)
    if not isinstance(answer, dict) or not answer.get("error") or answer.get("choices"):
        return None
    error = answer["error"]
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 502


def _words(body: bytes) -> tuple[str, str]:
    """The message and the code in an error body of OpenAI's, FastAPI's or no known shape."""
    text = body.decode(errors="replace").strip()
    try:
        answer: Any = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return " ".join(text.split())[:_WORDS_CHARS] or "(no text)", ""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    if not isinstance(error, dict):
        return str(error)[:_WORDS_CHARS], ""
    words = error.get("message") or error.get("detail") or text
    if isinstance(words, list):
        words = "; ".join(_one_invalid_field(item) for item in words)
    param = error.get("param")
    suffix = f" (param: {param})" if isinstance(param, str) and param not in str(words) else ""
    return f"{str(words)[:_WORDS_CHARS]}{suffix}", str(error.get("code") or error.get("type") or "")


def _one_invalid_field(item: Any) -> str:
    if not isinstance(item, dict):
        return str(item)
    return f"{'.'.join(str(part) for part in item.get('loc', []))}: {item.get('msg', item)}"


class Lessons(msgspec.Struct, frozen=True):
    """What an OpenAI-compatible server has taught us about its parameters."""

    budget_name: str = "max_tokens"
    dropped: frozenset[str] = frozenset()

    def apply(self, body: dict[str, Any]) -> dict[str, Any]:
        """The request body as this server wants it."""
        named = {self.budget_name if k == "max_tokens" else k: v for k, v in body.items()}
        return {k: v for k, v in named.items() if k not in self.dropped}


def learn(lessons: Lessons, body: dict[str, Any], error: InferenceError) -> Lessons:
    """What is known after this refusal of `body`; equal to `lessons` where it teaches nothing.

    Only "I don't support this parameter" teaches; "this value is wrong" is the user's to mend.
    """
    words = str(error).partition(": ")[2]
    if error.status not in (400, 422) or not _UNSUPPORTED.search(words):
        return lessons
    if "max_tokens" in body and "max_completion_tokens" in words:
        lessons = msgspec.structs.replace(lessons, budget_name="max_completion_tokens")
    for name in _DROPPABLE:
        if name in body and name not in lessons.dropped and re.search(rf"\b{name}\b", words):
            lessons = msgspec.structs.replace(lessons, dropped=lessons.dropped | {name})
            log.warning("inference_parameter_dropped", parameter=name, words=words)
    return lessons
