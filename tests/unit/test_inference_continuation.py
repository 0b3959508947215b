"""The next turn's prompt is what was sampled, untouched, and then what the template adds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.shared.inference.continuation import (
    extends,
    follows,
    last_answer,
    next_prompt,
    tail_between,
    with_placeholder,
)
from rollstream.shared.inference.types import Completion
from rollstream.shared.records import Message

START, END, MERGED = 1, 2, 3  # MERGED is one token for "ab": sampled so, tokenised otherwise


def tokens(text: str) -> list[int]:
    return [ord(char) for char in text]


def text_of(ids: list[int]) -> str:
    special = {START: "<s>", END: "<e>", MERGED: "ab"}
    return "".join(special.get(i) or chr(i) for i in ids)


def render(messages: list[Message], *, ask: bool = True) -> list[int]:
    ids: list[int] = []
    for message in messages:
        ids += [START, *tokens(f"{message['role']}\n{message['content']}"), END, *tokens("\n")]
    return [*ids, START, *tokens("assistant\n")] if ask else ids


def turn(prompt: list[int], sampled: list[int], finish: str = "stop") -> Completion:
    message = {"role": "assistant", "content": text_of([i for i in sampled if i != END])}
    return Completion(
        text=message["content"], message=message, finish_reason=finish,
        prompt_ids=prompt, token_ids=sampled,
    )


def find_tail(messages: list[Message]) -> list[int] | None:
    at = last_answer(messages)
    assert at is not None
    a, b = (render(with_placeholder(messages, at, letter)) for letter in "AB")
    return tail_between(a, b)


words = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FFF), max_size=12)
said = st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": words})
sampled_text = st.lists(st.sampled_from([MERGED, *tokens("abc\n ")]), max_size=6)


@given(st.lists(said, min_size=1, max_size=3), st.lists(
    st.tuples(sampled_text, st.booleans(), st.lists(said, min_size=1, max_size=2)),
    min_size=1, max_size=4,
))
def test_over_many_turns_nothing_sampled_changes_and_the_text_is_the_templates(
    opening: list[Message], turns: list[tuple[list[int], bool, list[Message]]]
) -> None:
    messages = list(opening)
    prompt = render(messages)
    for sampled, cut, more in turns:
        if cut and not sampled:
            continue
        prior = turn(prompt, sampled if cut else [*sampled, END], "length" if cut else "stop")
        messages = [*messages, prior.message, *more]
        following = next_prompt(prior, find_tail(messages) or [])
        assert following is not None
        assert following[: len(prompt) + len(sampled)] == [*prompt, *sampled]
        # What the model reads is the same text as a fresh rendering, tokens of its own aside.
        assert text_of(following) == text_of(render(messages))
        assert extends(prior, turn(following, [END]))
        prompt = following


@given(st.lists(st.integers(0, 9), max_size=8), st.lists(st.integers(0, 9), max_size=8))
def test_a_tail_ends_both_renderings_and_what_differs_is_short(one: list[int], two: list[int]):
    tail = tail_between(one, two)
    if tail is None:
        return
    assert tail
    assert one[-len(tail) :] == two[-len(tail) :] == tail
    heads = one[: -len(tail)], two[: -len(tail)]
    same = next(i for i in range(9) if heads[0][: i + 1] != heads[1][: i + 1])
    assert max(len(head) - same for head in heads) <= 2


@pytest.mark.parametrize(("one", "other"), [
    ([5, 6, 7], [5, 6, 7]),  # the template drops answers
    ([5, 70, 9, 70, 8], [5, 71, 9, 71, 8]),  # it says them twice
    ([5, 70], [5, 71]),  # nothing follows them
    ([5, 8], [5, 71, 8]),  # one rendering lacks it
])
def test_a_template_that_does_more_than_insert_the_answer_has_no_tail(one, other):
    assert tail_between(one, other) is None


@pytest.mark.parametrize(("sampled", "finish", "expected"), [
    ([7, END], "stop", [5, 7, END, 8]),
    ([7], "length", [5, 7, END, 8]),
    ([7, END], "length", [5, 7, END, 8]),  # the budget ran out on the very end of the turn
    ([7], "stop", None),  # a stop string
    ([7, 4], "stop", None),  # another end token than the template's
    ([], "length", None),
])
def test_how_a_turn_ended_decides_what_the_tail_brings(
    sampled: list[int], finish: str, expected: list[int] | None
):
    assert next_prompt(turn([5], sampled, finish), [END, 8]) == expected


def test_a_prior_without_token_ids_has_no_continuation():
    prior = Completion(text="x", message={}, finish_reason="stop")
    assert next_prompt(prior, [END, 8]) is None
    assert not extends(prior, turn([5], [END]))


def test_a_rewritten_history_extends_nothing():
    prior = turn([5, 6], [7, END])
    assert not extends(prior, turn([5, 6, 9, END, 8], [END]))
    assert not extends(prior, turn([5, 6], [END]))


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def test_the_last_answer_must_be_followed_by_something():
    answer = {"role": "assistant", "content": "x"}
    assert last_answer([user("q"), answer, user("r"), answer, user("s")]) == 3
    assert last_answer([user("q"), answer]) is None
    assert last_answer([user("q")]) is None
    assert last_answer([]) is None


def test_follows_sees_a_rewritten_history():
    function = {"name": "f", "arguments": "{}"}
    call: dict[str, Any] = {"id": "1", "type": "function", "function": function}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    sent = [user("q")]
    same = {"role": "assistant", "content": "", "tool_calls": [{**call, "id": "other"}]}
    new = {"role": "tool", "content": "4"}
    assert follows([*sent, same, new], sent, answer)
    assert not follows([*sent, same], sent, answer)
    assert not follows([user("Q"), same, new], sent, answer)
    assert not follows([*sent, {**same, "tool_calls": []}, new], sent, answer)
    assert not follows([*sent, new, same, new], sent, answer)
