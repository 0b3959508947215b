"""The engine over real HTTP with the real model: answers in vLLM's shapes, and refusals."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from engine_server import ASK, MODEL, PARIS, Client

TOLERANCE = 1e-4
GREEDY = 0.01
"""As good as greedy, which vLLM refuses for n = 2."""


async def test_chat(both: Client) -> None:
    answer = await both.chat(
        n=2, temperature=GREEDY, max_tokens=20, logprobs=True, top_logprobs=2,
        return_token_ids=True, return_tokens_as_token_ids=True, headers={"X-Request-Id": "mine"},
    )
    assert (answer["id"], answer["object"], answer["model"]) == (
        "chatcmpl-mine", "chat.completion", MODEL
    )
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice in answer["choices"]:
        assert choice["message"]["content"] == "The capital of France is Paris."
        assert choice["token_ids"] == PARIS
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
        first = choice["logprobs"]["content"][0]
        assert (first["token"], bytes(first["bytes"])) == ("token_id:504", b"The")
        assert first["top_logprobs"][0]["token"] == "token_id:504"
        assert len(first["top_logprobs"]) == 2
    prompt = len(answer["prompt_token_ids"])
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, 16)
    assert usage["total_tokens"] == prompt + 16
    assert answer["prompt_logprobs"] is None


async def test_chat_takes_text_parts_and_says_nothing_it_was_not_asked(both: Client) -> None:
    parts = [{"type": "text", "text": text} for text in ("What is the capital", "of France?")]
    answer = await both.chat(
        messages=[{"role": "user", "content": parts}], max_completion_tokens=1, temperature=0,
        request_id="body-id",
    )
    assert answer["id"] == "chatcmpl-body-id"
    choice = answer["choices"][0]
    assert (choice["logprobs"], choice["token_ids"], answer["prompt_token_ids"]) == (None,) * 3
    assert choice["finish_reason"] == "length"


async def test_stop_strings_and_tokens_cut_the_text(both: Client) -> None:
    greedy = {"temperature": 0, "return_token_ids": True}
    by_text = (await both.chat(stop=[" is", "zzz"], **greedy))["choices"][0]
    assert by_text["message"]["content"] == "The capital of France"
    assert (by_text["finish_reason"], by_text["stop_reason"]) == ("stop", " is")
    assert by_text["token_ids"] == PARIS[:5]
    by_token = (await both.chat(stop_token_ids=[314], **greedy))["choices"][0]
    assert by_token["message"]["content"] == "The capital of France"
    assert (by_token["stop_reason"], by_token["token_ids"]) == (314, PARIS[:5])


async def test_a_stream_is_the_whole_answer_in_pieces(both: Client) -> None:
    body = {
        "model": MODEL, "messages": ASK, "temperature": GREEDY, "stream": True, "n": 2,
        "return_token_ids": True, "logprobs": True, "stop": ["Rome"],
        "stream_options": {"include_usage": True},
    }
    async with both.session.post(both.url + "/v1/chat/completions", json=body) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        lines = (await answer.text()).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert events[0]["prompt_token_ids"][0] == 1
    assert events[-1]["usage"]["completion_tokens"] == 16
    for index in range(2):
        chunks = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == index]
        text = "".join(chunk["delta"].get("content", "") for chunk in chunks)
        assert text == "The capital of France is Paris."
        assert [i for chunk in chunks for i in chunk.get("token_ids", [])] == PARIS
        assert sum(len((c["logprobs"] or {"content": []})["content"]) for c in chunks) == 8
        assert [c["finish_reason"] for c in chunks if c["finish_reason"]] == ["stop"]
        assert len(chunks) > 4


async def test_completions_of_texts_ids_and_lists(both: Client) -> None:
    greedy = {"model": MODEL, "temperature": 0, "max_tokens": 2, "return_token_ids": True}
    ids = (await both.post("/tokenize", prompt="The capital of France is"))["tokens"]
    for prompt, count in [("The capital of France is", 1), (ids, 1), ([ids, ids], 2),
                          (["The capital of France is"], 1)]:
        answer = await both.post("/v1/completions", prompt=prompt, logprobs=1, **greedy)
        assert [choice["index"] for choice in answer["choices"]] == list(range(count))
        for choice in answer["choices"]:
            assert choice["prompt_token_ids"] == ids
            assert choice["text"].startswith(" Paris")
            logprobs = choice["logprobs"]
            assert logprobs["tokens"][0] == " Paris"
            assert logprobs["top_logprobs"][0] == {" Paris": logprobs["token_logprobs"][0]}
            assert logprobs["text_offset"] == [0, len(" Paris")]


async def test_echo_scores_the_prompt_in_openai_s_shape(both: Client) -> None:
    body = {"model": MODEL, "prompt": "The capital of France", "temperature": 0, "logprobs": 1}
    echo = await both.post("/v1/completions", echo=True, max_tokens=0, **body)
    choice = echo["choices"][0]
    assert choice["text"] == "The capital of France"
    lists = choice["logprobs"]
    assert lists["tokens"] == ["The", " capital", " of", " France"]
    assert (lists["token_logprobs"][0], lists["top_logprobs"][0]) == (None, None)
    scored = await both.post("/v1/completions", prompt_logprobs=1, max_tokens=1, **body)
    rows = scored["choices"][0]["prompt_logprobs"]
    own = [next(iter(row.values()))["logprob"] for row in rows[1:]]
    np.testing.assert_allclose(lists["token_logprobs"][1:], own, atol=TOLERANCE)


async def test_generate_takes_and_gives_tokens(both: Client) -> None:
    rendered = await both.post(
        "/v1/chat/completions/render", model=MODEL, messages=ASK, temperature=GREEDY, max_tokens=20
    )
    rendered["sampling_params"] |= {"logprobs": 1, "prompt_logprobs": 0, "n": 2}
    answer = await both.post("/inference/v1/generate", **(rendered | {"request_id": "abc"}))
    assert answer["request_id"] == "generate-tokens-abc"
    assert len(answer["prompt_logprobs"]) == len(rendered["token_ids"])
    assert len(answer["prompt_logprobs"][1]) == 1
    for choice in answer["choices"]:
        assert choice["token_ids"] == PARIS
        assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": 8}]
        first = choice["logprobs"]["content"][0]
        assert (first["token_id"], first["rank"]) == (504, 1)
        assert first["top_logprobs"] == [
            {"token_id": 504, "logprob": first["logprob"], "rank": 1}
        ]


async def test_tokenize_and_back(both: Client) -> None:
    answer = await both.post("/tokenize", prompt="hi there", return_token_strs=True)
    assert answer == {
        "count": 2, "max_model_len": 2048, "tokens": [6004, 665], "token_strs": ["hi", "Ġthere"]
    }
    assert await both.post("/detokenize", tokens=[6004, 665]) == {"prompt": "hi there"}
    chat = await both.post("/tokenize", messages=ASK, add_generation_prompt=False)
    whole = await both.post("/tokenize", messages=ASK)
    assert whole["tokens"] == chat["tokens"] + [1, 520, 9531, 198]


async def test_what_it_says_of_itself(both: Client) -> None:
    assert await both.get("/health") is None
    assert await both.get("/ping") is None
    assert (await both.get("/version"))["version"]
    (card,) = (await both.get("/v1/models"))["data"]
    assert (card["id"], card["max_model_len"]) == (MODEL, 2048)
    before = await both.metric("generation_tokens_total")
    stopped = await both.metric("request_success_total")
    await both.chat(max_tokens=3, n=2, ignore_eos=True)
    assert await both.metric("generation_tokens_total") == before + 6
    assert await both.metric("request_success_total") == stopped + 2


@pytest.mark.parametrize(("body", "status"), [
    ({"model": "gpt-9"}, 404), ({"n": 0}, 400), ({"temperature": -1}, 400), ({"top_p": 0}, 400),
    ({"max_tokens": "many"}, 400), ({"messages": [{"role": "user", "content": 5}]}, 400),
    ({"top_logprobs": 2}, 400), ({"logprobs": True, "top_logprobs": 21}, 400),
    ({"prompt_logprobs": 50}, 400),
    ({"messages": [{"role": "user", "content": "a b " * 1500}]}, 400),
])
async def test_what_both_refuse(both: Client, body: dict[str, Any], status: int) -> None:
    error = (await both.chat(status=status, **body))["error"]
    assert error["code"] == status
    assert error["message"]
    assert error["type"]


async def test_token_routes_refuse_what_is_no_token(both: Client) -> None:
    bad = await both.post("/v1/completions", 400, prompt=[49152], model=MODEL)
    assert "out of vocabulary" in bad["error"]["message"]
    for route in ("/v1/completions", "/inference/v1/generate"):
        await both.post(route, 400, prompt=[5, "x"], model=MODEL)


@pytest.mark.parametrize(
    ("body", "status", "param", "says"),
    [
        ({"model": "gpt-9"}, 404, "model", "The model `gpt-9` does not exist"),
        ({"n": 0}, 400, "n", "n: Expected `int` >= 1"),
        ({"temperature": -1}, 400, "temperature", "temperature: Expected `float` >= 0"),
        ({"top_p": 0}, 400, "top_p", "top_p: "),
        ({"max_tokens": "many"}, 400, "max_tokens", "max_tokens: Expected `int"),
        ({"messages": []}, 400, "messages", "messages: "),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages", "messages[0].content"),
        ({"messages": [{"content": "x"}]}, 400, "messages", "messages[0].role"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty", "not supported by this engine"),
        ({"tools": [{"type": "function"}]}, 400, "tools", "knows no tools"),
        ({"top_logprobs": 2}, 400, "top_logprobs", "needs logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "logprobs", "max allowed: 20"),
        ({"prompt_logprobs": 50}, 400, "prompt_logprobs",
         "Requested prompt logprobs of 50, which is greater than max allowed: 20"),
        ({"max_tokens": 2040}, 400, "messages", "maximum context length is 2048 tokens"),
        ({"messages": [{"role": "user", "content": "a b " * 1500}]}, 400, "messages",
         "maximum context length is 2048 tokens"),
    ],
)
async def test_refusals(
    engine: Client, body: dict[str, Any], status: int, param: str, says: str
) -> None:
    error = (await engine.chat(status=status, **body))["error"]
    assert (error["param"], error["code"]) == (param, status)
    assert says in error["message"]
    assert error["type"] == ("NotFoundError" if status == 404 else "BadRequestError")


async def test_more_refusals(engine: Client) -> None:
    bad = await engine.post("/v1/completions", 400, prompt=[49152], model=MODEL)
    assert "Token id 49152 is out of vocabulary" in bad["error"]["message"]
    bad = await engine.post("/v1/completions", 400, prompt=[5, "x"], model=MODEL)
    assert bad["error"]["param"] == "prompt"
    bad = await engine.post("/inference/v1/generate", 400, token_ids=[1])
    assert bad["error"]["param"] == "sampling_params"
    bad = await engine.post("/no/such/route", 404)
    assert bad["error"]["type"] == "NotFoundError"
    bad = await engine.post("/collective_rpc", 400, method="reload_weights",
                            kwargs={"weights_path": "/no/such"})
    assert bad["error"]["param"] == "kwargs.weights_path"
