"""Answers as vLLM 0.32 and others give them, and answers that can't be true."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollstream.shared.inference import bodies, dialects
from rollstream.shared.inference.faults import Lessons
from rollstream.shared.inference.types import InferenceError
from rollstream.shared.records import VersionSpan


def wire(answer: Any) -> bytes:
    return json.dumps(answer).encode()


def chat_answer(**changes: Any) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": {
            "role": "assistant", "content": "3 + 4", "refusal": None, "tool_calls": [],
            "function_call": None, "reasoning": None,
        },
        "logprobs": {"content": [
            {"token": "3", "logprob": -2.2, "bytes": [51], "top_logprobs": []},
            {"token": " +", "logprob": -0.5, "bytes": [32, 43], "top_logprobs": []},
        ]},
        "finish_reason": "length", "stop_reason": None, "token_ids": [35, 1232],
        "routed_experts": None,
    }
    return {
        "id": "chatcmpl-1", "object": "chat.completion", "model": "smol",
        "choices": [choice | changes],
        "usage": {
            "prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": 1},
            "completion_tokens_details": {"reasoning_tokens": 1}, "cost": 0.01,
        },
        "prompt_logprobs": None, "prompt_token_ids": [1, 9690, 198], "prompt_text": None,
    }


def test_a_chat_answer_with_tokens():
    done = dialects.parse_chat(wire(chat_answer()), want_tokens=True)
    assert done.text == "3 + 4"
    assert done.message == {"role": "assistant", "content": "3 + 4"}
    assert done.finish_reason == "length"
    assert (done.prompt_ids, done.token_ids) == ([1, 9690, 198], [35, 1232])
    assert done.logprobs == [-2.2, -0.5]
    assert done.versions == []
    usage = done.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 2)
    assert (usage.cached_tokens, usage.reasoning_tokens, usage.requests) == (1, 1, 1)
    assert usage.cost_usd == 0.01


def test_a_text_only_answer_has_no_ids_even_where_the_server_sent_some():
    done = dialects.parse_chat(wire(chat_answer()), want_tokens=False)
    assert (done.prompt_ids, done.token_ids, done.logprobs) == (None, None, None)
    minimal = {"choices": [{"message": {"content": "hi"}, "finish_reason": None}]}
    done = dialects.parse_chat(wire(minimal), want_tokens=False)
    assert (done.text, done.finish_reason, done.usage.prompt_tokens) == ("hi", "", 0)


def test_tool_calls_and_reasoning_are_kept_and_text_may_be_empty():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"}
    done = dialects.parse_chat(
        wire(chat_answer(message=message, finish_reason="tool_calls")), want_tokens=True
    )
    assert done.message == message
    assert (done.text, done.finish_reason) == ("", "tool_calls")


def test_an_aborted_answer_without_tokens_is_an_answer():
    answer = chat_answer(token_ids=[], logprobs=None, finish_reason="abort")
    done = dialects.parse_chat(wire(answer), want_tokens=True)
    assert (done.token_ids, done.logprobs, done.finish_reason) == ([], [], "abort")


def logprobs_of(*values: float | None) -> dict[str, Any]:
    return {"content": [{"token": "x", "logprob": value} for value in values]}


@pytest.mark.parametrize(("changes", "reason"), [
    ({"token_ids": None}, "no token_ids"),
    ({"logprobs": None}, "no logprobs"),
    ({"logprobs": logprobs_of(-1.0)}, "1 logprobs for 2 token_ids"),
    ({"logprobs": logprobs_of(-1.0, None)}, r"logprobs\[1\] is None"),
    ({"logprobs": logprobs_of(-1.0, -9999.0)}, r"logprobs\[1\] is -9999.0"),
    ({"logprobs": logprobs_of(-1.0, float("nan"))}, "can't be used"),
    ({"logprobs": logprobs_of(float("-inf"), -1.0)}, "can't be used"),
    ({"logprobs": {"content": [{"token_id": 35, "logprob": -1}, {"token_id": 9, "logprob": -1}]}},
     "other tokens"),
    ({"token_ids": [35, "x"]}, r"Expected `int`, got `str` - at `\$.choices\[0\].token_ids\[1\]`"),
    ({"message": None}, "no message"),
])
def test_what_cant_be_true_of_sampled_tokens(changes: dict[str, Any], reason: str):
    with pytest.raises(InferenceError, match=reason) as wrong:
        dialects.parse_chat(wire(chat_answer(**changes)), want_tokens=True)
    assert not wrong.value.retryable


def test_an_answer_without_choice_or_prompt_ids_or_of_no_json():
    with pytest.raises(InferenceError, match="no choice"):
        dialects.parse_chat(b'{"choices": []}', want_tokens=False)
    with pytest.raises(InferenceError, match="no prompt_token_ids"):
        dialects.parse_chat(wire(chat_answer() | {"prompt_token_ids": None}), want_tokens=True)
    with pytest.raises(InferenceError, match="<html> nginx"):
        dialects.parse_chat(b"<html>\n nginx", want_tokens=False)


def generate_answer(**changes: Any) -> bytes:
    content = [
        {"token_id": i, "logprob": -1.0 - n, "rank": 1, "top_logprobs": []}
        for n, i in enumerate([16075, 253, 2])
    ]
    choice = {
        "index": 0, "finish_reason": "stop", "stop_reason": None, "token_ids": [16075, 253, 2],
        "routed_experts": None, "sampling_mask": None, "logprobs": {"content": content},
        "weight_versions": [
            {"version": "default", "start": 0, "end": 2}, {"version": "7", "start": 2, "end": 3},
        ],
    }
    return wire({
        "request_id": "generate-tokens-1", "model": "smol", "prompt_token_ids": None,
        "prompt_logprobs": None, "output_mode": "tokens", "choices": [choice | changes],
        "usage": {"prompt_tokens": 2, "completion_tokens": 3},
    })


def test_a_generate_answer_tells_which_weights_sampled_which_token():
    done = dialects.parse_generate(generate_answer(), [1, 4093])
    assert (done.prompt_ids, done.token_ids) == ([1, 4093], [16075, 253, 2])
    assert done.logprobs == [-1.0, -2.0, -3.0]
    assert done.versions == [VersionSpan(0, 0, 2), VersionSpan(7, 2, 3)]


def test_a_version_that_is_no_number_is_no_version():
    spans = [{"version": "step-1", "start": 0, "end": 3}]
    assert dialects.parse_generate(generate_answer(weight_versions=spans), [1]).versions == []


@pytest.mark.parametrize("edges", [[(0, 2)], [(0, 2), (3, 3)], [(1, 3)], [(0, 4)]])
def test_versions_that_dont_cover_the_tokens_are_refused(edges: list[tuple[int, int]]):
    spans = [{"version": "1", "start": start, "end": end} for start, end in edges]
    with pytest.raises(InferenceError, match="don't cover the 3 sampled tokens"):
        dialects.parse_generate(generate_answer(weight_versions=spans), [1])


def completion_answer(**changes: Any) -> bytes:
    choice = {
        "index": 0, "text": " Paris", "finish_reason": "length", "stop_reason": None,
        "logprobs": {
            "text_offset": [0], "token_logprobs": [-0.435], "tokens": ["token_id:7"],
            "top_logprobs": [{"token_id:7": -0.435}],
        },
        "token_ids": [7], "prompt_token_ids": [1, 4093, 198],
        "prompt_logprobs": [
            None,
            {"4093": {"logprob": -13.96, "rank": 11398, "decoded_token": "user"},
             "29": {"logprob": -0.96, "rank": 1, "decoded_token": "-"},
             "28": {"logprob": -1.96, "rank": 2, "decoded_token": "+"}},
            {"198": {"logprob": -3.0, "rank": 2, "decoded_token": "\n"},
             "5": {"logprob": -0.1, "rank": 1, "decoded_token": "x"}},
        ],
    }
    return wire({"id": "cmpl-1", "choices": [choice | changes], "usage": None})


def test_a_completion_to_ids():
    done = dialects.parse_completion(completion_answer(), [1, 4093, 198])
    assert (done.text, done.token_ids, done.logprobs) == (" Paris", [7], [-0.435])
    assert done.usage.prompt_tokens == 3
    with pytest.raises(InferenceError, match="not the 2 ids"):
        dialects.parse_completion(completion_answer(), [1, 4093])


def test_prompt_logprobs_by_rank_with_the_own_token_inside_or_outside_the_best():
    scored = dialects.parse_prompt_logprobs(completion_answer(), [1, 4093, 198], 2)
    assert scored.top_ids == [[], [29, 28], [5, 198]]
    assert scored.top_logprobs == [[], [-0.96, -1.96], [-0.1, -3.0]]
    assert scored.own == [None, -13.96, -3.0]


def test_prompt_logprobs_of_the_own_token_only():
    rows = [None, {"4093": {"logprob": -13.96, "rank": 3}}, {"198": {"logprob": -0.1, "rank": 1}}]
    answer = completion_answer(prompt_logprobs=rows)
    scored = dialects.parse_prompt_logprobs(answer, [1, 4093, 198], 0)
    assert scored.top_ids == [[], [], []]
    assert scored.own == [None, -13.96, -0.1]


OWN = {"4093": {"logprob": -1.0, "rank": 1}}
LAST = {"198": {"logprob": -0.1, "rank": 1}}


@pytest.mark.parametrize(("rows", "reason"), [
    (None, "no prompt_logprobs"),
    ([None, OWN], "2 positions for 3 tokens"),
    ([None, OWN, None], r"\[2\] lacks the prompt's own token 198"),
    ([None, OWN, {"5": {"logprob": -0.1, "rank": 1}}], r"\[2\] lacks the prompt's own token 198"),
    ([None, OWN, {"198": {"logprob": -0.1, "rank": 2}}], r"\[2\] has ranks \[\], not 1 to 1"),
    ([None, OWN, {"198": {"logprob": -0.1}}], r"\[2\] has ranks"),
    ([None, OWN, {**LAST, "6": {"logprob": -0.1, "rank": 1}}], r"ranks \[1, 1\]"),
    ([None, OWN, {"198": {"logprob": None, "rank": 1}}], r"\[2\] is None"),
    ([None, OWN, {"198": {"logprob": -9999.0, "rank": 1}}], r"\[2\] is -9999.0"),
    ([None, OWN, {"198": {"logprob": float("nan"), "rank": 1}}], "can't be used"),
    ([None, OWN, {"x": {"logprob": -1.0, "rank": 1}}], "can't be used"),
])
def test_what_cant_be_true_of_prompt_logprobs(rows: Any, reason: str):
    with pytest.raises(InferenceError, match=reason) as wrong:
        dialects.parse_prompt_logprobs(completion_answer(prompt_logprobs=rows), [1, 4093, 198], 1)
    assert not wrong.value.retryable


def test_prompt_logprobs_of_other_tokens_are_refused():
    with pytest.raises(InferenceError, match="not the 3 ids that were sent"):
        dialects.parse_prompt_logprobs(completion_answer(), [1, 4093, 199], 2)


def test_a_token_request_names_every_parameter_that_a_model_might_recommend_otherwise():
    body = bodies.chat_body(
        "m", [], {"temperature": 0.7, "max_tokens": 5, "n": 1}, tools=None, seed=3, want_tokens=True
    )
    assert body == {
        "model": "m", "messages": [], "temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
        "repetition_penalty": 1.0, "max_tokens": 5, "seed": 3,
        "logprobs": True, "top_logprobs": 0, "return_token_ids": True,
    }


def test_a_text_request_sends_what_it_was_given_only():
    tool = {"type": "function", "function": {"name": "f"}}
    body = bodies.chat_body(
        "m", [], {"max_completion_tokens": 5, "top_p": None}, tools=[tool], seed=None,
        want_tokens=False, lessons=Lessons(budget_name="max_completion_tokens"),
    )
    assert body == {"model": "m", "messages": [], "max_completion_tokens": 5, "tools": [tool]}


def test_template_arguments_go_to_the_template_only():
    sampling = {"max_tokens": 5, "chat_template_kwargs": {"enable_thinking": False}}
    assert "chat_template_kwargs" in bodies.tokenize_body("m", [], sampling, None)
    assert "max_tokens" not in bodies.tokenize_body("m", [], sampling, None)
    assert "chat_template_kwargs" not in bodies.completions_body("m", [1], sampling, 1)
    params = bodies.generate_body("m", [1], sampling, 1)["sampling_params"]
    assert "chat_template_kwargs" not in params
    assert (params["max_tokens"], params["seed"], params["n"], params["top_k"]) == (5, 1, 1, -1)


def test_several_answers_and_none_are_refused_by_name():
    with pytest.raises(ValueError, match=r"sampling.n is 4"):
        bodies.chat_body("m", [], {"n": 4}, tools=None, seed=1, want_tokens=True)
    with pytest.raises(ValueError, match=r"sampling.max_tokens is 0"):
        bodies.generate_body("m", [1], {"max_tokens": 0}, 1)
