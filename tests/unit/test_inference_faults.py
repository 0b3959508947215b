"""What a server's refusal means, in the words of the servers that gave it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollstream.shared.inference.faults import (
    Busy,
    Lessons,
    error_from,
    error_within_200,
    learn,
)
from rollstream.shared.inference.types import ContextOverflow, InferenceError

URL = "http://h:1/v1/chat/completions"


def openai(message: str, **fields: Any) -> bytes:
    error = {"message": message, "type": "t", "param": None, **fields}
    return json.dumps({"error": error}).encode()


def refused(status: int, body: bytes, **headers: Any) -> InferenceError:
    return error_from(status, body, URL, **headers)


@pytest.mark.parametrize(("status", "retryable"), [
    (400, False), (401, False), (403, False), (404, False), (408, True), (413, False),
    (422, False), (429, True), (500, True), (501, False), (502, True), (503, True), (529, True),
])
def test_which_statuses_may_pass(status: int, retryable: bool):
    error = refused(status, openai("no"))
    assert (error.retryable, error.status) == (retryable, status)
    assert str(error) == f"{URL} answered {status}: no"


@pytest.mark.parametrize(("body", "words"), [
    (openai("bad", param="seed"), "bad (param: seed)"),
    (b'{"object": "error", "message": "old vLLM"}', "old vLLM"),
    (b'{"error": "plain"}', "plain"),
    (b'{"detail": "Not Found"}', "Not Found"),
    (b'{"detail": [{"loc": ["body", "seed"], "msg": "Extra inputs are not permitted"}]}',
     "body.seed: Extra inputs are not permitted"),
    (b"<html>\n  Bad   Gateway", "<html> Bad Gateway"),
    (b"", "(no text)"),
    (b"\xff", "\ufffd"),
])
def test_the_servers_own_words(body: bytes, words: str):
    assert str(refused(400, body)).endswith(f"answered 400: {words}")


def test_a_page_of_html_is_cut():
    assert len(str(refused(500, b"x" * 10_000))) < 600


@pytest.mark.parametrize("words", [
    "This model's maximum context length is 2048 tokens. However, you requested 4203 tokens",
    "'max_tokens' or 'max_completion_tokens' is too large: 2048. This model's maximum context "
    "length is 2048 tokens and your request has 38 input tokens (2048 > 2048 - 38).",
    "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)",
    "The decoder prompt (length 5000) is longer than the maximum model length of 2048.",
    "prompt is too long: 9000 tokens > 8000 maximum",
    "Your input exceeds the context window of this model",
    "the request exceeds the available context size",
])
def test_a_prompt_that_doesnt_fit(words: str):
    assert isinstance(refused(400, openai(words)), ContextOverflow)
    assert not isinstance(refused(500, openai(words)), ContextOverflow)


def test_other_things_too_long_are_not_the_context():
    error = refused(400, openai("stop string is too long"))
    assert not isinstance(error, ContextOverflow)


def test_a_used_up_quota_doesnt_pass_and_patience_is_told():
    assert not refused(429, openai("pay", code="insufficient_quota")).retryable
    busy = refused(429, openai("slow down"), retry_after="7")
    assert isinstance(busy, Busy)
    assert busy.retry_after_s == 7.0
    assert busy.retryable
    assert not isinstance(refused(429, openai("x"), retry_after="Wed, 21 Oct"), Busy)
    assert not isinstance(refused(400, openai("x"), retry_after="7"), Busy)


@pytest.mark.parametrize(("body", "status"), [
    (b'{"error": {"code": 429, "message": "x"}}', 429),
    (b' {"error": {"code": "boom"}}', 502),
    (b'{"error": "boom"}', 502),
    (b'{"error": null, "choices": []}', None),
    (b'{"choices": []}', None),
    (b'{"error": ', None),
])
def test_an_error_sent_as_200(body: bytes, status: int | None):
    assert error_within_200(body) == status


BODY = {"model": "m", "messages": [], "max_tokens": 5, "temperature": 0.7, "seed": 1}


@pytest.mark.parametrize(("words", "lessons"), [
    ("Unsupported parameter: 'max_tokens' is not supported with this model. "
     "Use 'max_completion_tokens' instead.", Lessons(budget_name="max_completion_tokens")),
    ("Unsupported value: 'temperature' does not support 0.7 with this model. "
     "Only the default (1) value is supported.", Lessons(dropped=frozenset({"temperature"}))),
    ("Unrecognized request argument supplied: seed", Lessons(dropped=frozenset({"seed"}))),
    ("temperature must be between 0 and 2", Lessons()),
    ("unsupported message role: robot", Lessons()),
    ("Unsupported parameter: logit_bias", Lessons()),
])
def test_one_refusal_teaches(words: str, lessons: Lessons):
    assert learn(Lessons(), BODY, refused(400, openai(words))) == lessons
    assert learn(Lessons(), BODY, refused(500, openai(words))) == Lessons()


def test_lessons_add_up_and_are_applied():
    first = learn(Lessons(), BODY, refused(400, openai("seed is not supported")))
    both = learn(first, first.apply(BODY), refused(
        422, b'{"detail": [{"loc": ["body", "temperature"], "msg": "Extra inputs not permitted"}]}'
    ))
    assert both.apply(BODY) == {"model": "m", "messages": [], "max_tokens": 5}
    assert learn(both, both.apply(BODY), refused(400, openai("seed is not supported"))) == both
    renamed = Lessons(budget_name="max_completion_tokens")
    assert renamed.apply({"max_tokens": 5}) == {"max_completion_tokens": 5}
