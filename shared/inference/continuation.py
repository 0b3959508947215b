"""Token algebra of a conversation's next turn: what was sampled is never tokenised again.

The next turn's prompt is `prior prompt + sampled tokens + tail`, the tail being what the chat
template puts between the end of the model's text and the next generation prompt. It is found by
rendering the whole conversation twice on the server with the model's last answer replaced by a
placeholder of one letter: all after the one place where the two differ is the tail, and its first
token is the one that ends the model's turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from rollstream.shared.inference.types import Completion
from rollstream.shared.records import Message

PLACEHOLDERS = ("A", "B")
_PLACEHOLDER_TOKENS = 2
"""One letter takes one token, or two where a tokenizer gives leading space its own."""


def last_answer(messages: Sequence[Message]) -> int | None:
    """Where the model's last answer lies; None where there is none or nothing follows it."""
    for index in reversed(range(len(messages))):
        if messages[index].get("role") == "assistant":
            return index if index + 1 < len(messages) else None
    return None


def with_placeholder(messages: Sequence[Message], index: int, text: str) -> list[Message]:
    """The conversation with the answer at `index` replaced by `text`."""
    return [*messages[:index], {"role": "assistant", "content": text}, *messages[index + 1 :]]


def tail_between(one: Sequence[int], other: Sequence[int]) -> list[int] | None:
    """What follows the answer, from two renderings that differ in the placeholder only.

    None where they differ in more than that place: the template repeats, drops or rewrites answers.
    """
    before = _common(zip(one, other, strict=False))
    rest = zip(reversed(one[before:]), reversed(other[before:]), strict=False)
    after = _common(rest)
    differing = [len(ids) - before - after for ids in (one, other)]
    if after == 0 or not all(0 < count <= _PLACEHOLDER_TOKENS for count in differing):
        return None
    return list(one[len(one) - after :])


def _common(pairs: Iterable[tuple[int, int]]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def next_prompt(prior: Completion, tail: Sequence[int]) -> list[int] | None:
    """The next turn's prompt ids; they start with the prior prompt and the sampled tokens.

    A turn cut by its budget lacks the end-of-turn token, which the tail then brings (unsampled).
    None where the turn ended otherwise (a stop string, another end token): the template's text
    after it would not fit.
    """
    if not prior.prompt_ids or not prior.token_ids or not tail:
        return None
    sampled = [*prior.prompt_ids, *prior.token_ids]
    if prior.token_ids[-1] == tail[0]:
        return [*sampled, *tail[1:]]
    return [*sampled, *tail] if prior.finish_reason == "length" else None


def extends(prior: Completion, turn: Completion) -> bool:
    """Whether `turn` goes on in prior's token sequence; if not, a new sequence starts with it."""
    if not prior.prompt_ids or not prior.token_ids or not turn.prompt_ids:
        return False
    history = [*prior.prompt_ids, *prior.token_ids]
    return turn.prompt_ids[: len(history)] == history


def follows(messages: Sequence[Message], sent: Sequence[Message], answer: Message) -> bool:
    """Whether `messages` is what was sent, the answer that came, and something new.

    Where an environment rewrote the history this is False, and `prior` must not be passed on.
    """
    at = len(sent)
    return (
        len(messages) > at + 1
        and list(messages[:at]) == list(sent)
        and _essence(messages[at]) == _essence(answer)
    )


def _essence(message: Message) -> tuple[object, ...]:
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    return (
        message.get("role"),
        message.get("content") or "",
        [(call.get("name"), call.get("arguments")) for call in calls],
    )
