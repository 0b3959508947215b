"""The client against servers over real HTTP: a fake in vLLM's dialect, this project's engine, and
real vLLM (`make test-vllm`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from engine_server import MODEL, Server
from fake_vllm import (
    END,
    QUESTION,
    SAMPLING,
    SEVEN,
    Fake,
    answer_with,
    ask,
    client_of,
    ids_of,
    refusal,
)

from rollstream.shared.inference import endpoints
from rollstream.shared.inference.continuation import extends, follows
from rollstream.shared.inference.types import Completion, ContextOverflow, InferenceError
from rollstream.shared.inference.vocabulary import difference
from rollstream.shared.records import VersionSpan

pytestmark = pytest.mark.usefixtures("without_patience")


# What every server in vLLM's dialect must do


@pytest.fixture(scope="module")
def seven_server(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """This project's engine, saying seven too, without a model at work."""
    script = tmp_path_factory.mktemp("engine") / "script.jsonl"
    script.write_text('{"text": "3 + 4 = seven"}\n')
    running = Server("--script", str(script))
    yield running.url + "/v1", MODEL
    assert running.stop() == 0


@pytest.fixture(params=[
    "fake", "engine", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(400)]),
])
async def served(request: pytest.FixtureRequest) -> AsyncIterator[tuple[str, str]]:
    if request.param == "fake":
        async with Fake() as fake:
            yield fake.url, "m"
    elif request.param == "engine":
        yield request.getfixturevalue("seven_server")
    else:
        vllm: Server = request.getfixturevalue("vllm_server")
        yield vllm.url + "/v1", MODEL


async def test_a_vllm_can_do_everything_and_says_so(served: tuple[str, str]):
    url, model = served
    async with client_of(url) as client:
        await client.wait_until_up(10.0)
        found = await client.capabilities(model)
        assert model in found.models
        assert (found.token_ids, found.logprobs, found.tokenize) == (True, True, True)
        assert found.generate_route
        assert found.prompt_logprobs
        assert found.max_prompt_logprobs == 20
        assert found.derender or "derender" in found.detail
        assert found.weight_version
        assert found.context_tokens > 0
        assert found.logprobs_mode == "processed"


async def test_turns_of_one_conversation_are_one_token_sequence(served: tuple[str, str]):
    url, model = served
    async with client_of(url) as client:
        messages = QUESTION
        prior = await ask(client, messages=messages, model=model)
        for _ in range(2):
            assert prior.token_ids
            assert prior.prompt_ids
            assert prior.logprobs is not None
            assert len(prior.logprobs) == len(prior.token_ids)
            assert prior.message["content"] == prior.text
            following = [*messages, prior.message, {"role": "user", "content": "Why?"}]
            assert follows(following, messages, prior.message)
            turn = await ask(client, messages=following, model=model, prior=prior)
            assert extends(prior, turn)
            messages, prior = following, turn


async def test_a_teacher_gives_k_best_for_every_position(served: tuple[str, str]):
    url, model = served
    async with client_of(url) as client:
        ids = (await ask(client, model=model)).prompt_ids
        assert ids
        for k in (0, 3):
            scored = await client.prompt_logprobs(ids, k, model=model, deadline_s=20.0)
            assert [len(row) for row in scored.top_ids] == [0, *[k] * (len(ids) - 1)]
            assert [len(row) for row in scored.top_logprobs] == [len(row) for row in scored.top_ids]
            assert all(row == sorted(row, reverse=True) for row in scored.top_logprobs)
            assert scored.own[0] is None
            assert all(own is not None and own <= 0 for own in scored.own[1:])


async def test_each_token_has_its_place_in_the_text(served: tuple[str, str]):
    url, model = served
    async with client_of(url) as client:
        ids = (await ask(client, model=model)).prompt_ids
        assert ids
        seen = await client.prompt_logprobs(ids, 0, model=model, deadline_s=20.0)
        offsets = await client.text_offsets(ids, seen, model=model, deadline_s=20.0)
        assert offsets is not None
        assert (offsets[0], len(offsets)) == (0, len(ids))
        assert offsets == sorted(offsets)
        assert offsets[-1] > len("3 + 4?")


async def test_a_tokenizer_is_told_from_another(served: tuple[str, str]):
    url, model = served
    async with client_of(url) as client:
        one = await client.tokenizer_fingerprint(model, 30.0)
        assert difference(one, await client.tokenizer_fingerprint(model, 30.0)) == ""
        assert "become other tokens" in difference(one, ["" for _ in one])


async def test_a_model_that_isnt_there_is_refused_at_once_in_the_servers_words(
    served: tuple[str, str],
):
    url, _ = served
    async with client_of(url) as client:
        words = r"answered 404: .*nope.* does not exist"
        with pytest.raises(InferenceError, match=words) as refused:
            await ask(client, model="nope")
        assert (refused.value.status, refused.value.retryable) == (404, False)


async def test_a_prompt_beyond_the_context(served: tuple[str, str]):
    url, model = served
    async with client_of(url) as client:
        long = [{"role": "user", "content": "word " * 20_000}]
        with pytest.raises(ContextOverflow, match="context"):
            await ask(client, model=model, messages=long)


async def test_a_budget_beyond_the_context_is_cut_to_it(served: tuple[str, str]):
    url, model = served
    async with client_of(url) as client:
        sampling = {"max_tokens": 10_000_000, "stop": ["e", "a", "i"]}
        first = await ask(client, model=model, sampling=sampling)
        assert first.token_ids


# How a later turn is asked for


def second_turn(prior: Completion) -> dict[str, Any]:
    return {
        "messages": [*QUESTION, prior.message, {"role": "user", "content": "Why?"}], "prior": prior,
    }


async def test_a_later_turn_goes_by_token_ids_and_tells_its_versions():
    fake = Fake(without=("/v1/chat/completions/derender",))
    async with fake, client_of(fake.url) as client:
        prior = await ask(client)
        turn = await ask(client, **second_turn(prior))
        _probe, sent = fake.asked("/inference/v1/generate")
        new = ids_of([{"role": "user", "content": "Why?"}])
        assert prior.prompt_ids
        assert sent["token_ids"] == [*prior.prompt_ids, SEVEN, END, ord("\n"), *new]
        assert sent["sampling_params"] == SAMPLING | {
            "seed": 7, "n": 1, "logprobs": 1, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
        assert (turn.text, turn.token_ids, turn.logprobs) == ("seven", [SEVEN, END], [-0.5, -1.5])
        assert turn.message == {"role": "assistant", "content": "seven"}
        assert turn.versions == [VersionSpan(5, 0, 2)]


async def test_a_turn_cut_by_its_budget_is_closed_by_the_template():
    async with Fake() as fake, client_of(fake.url) as client:
        fake.sampled, fake.finish = [SEVEN, SEVEN], "length"
        prior = await ask(client)
        await ask(client, **second_turn(prior))
        sent = fake.asked("/inference/v1/generate")[-1]["token_ids"]
        assert prior.prompt_ids
        history = [*prior.prompt_ids, SEVEN, SEVEN]
        assert sent[: len(history) + 2] == [*history, END, ord("\n")]


async def test_the_server_parses_tool_calls_and_reasoning_where_it_can():
    tools = [{"type": "function", "function": {"name": "f"}}]
    async with Fake() as fake, client_of(fake.url) as client:
        prior = await ask(client, tools=tools)
        turn = await ask(client, tools=tools, **second_turn(prior))
        assert extends(prior, turn)
        assert (turn.text, turn.message["reasoning"]) == ("derendered", "hm")
        assert (turn.finish_reason, len(turn.message["tool_calls"])) == ("tool_calls", 1)
        assert fake.asked("/v1/chat/completions/derender")[-1]["chat_request"]["tools"] == tools


@pytest.mark.parametrize(("without", "changes"), [
    (("/v1/chat/completions/derender",), {"tools": [{"type": "function"}]}),
    (("/tokenize",), {}),
    ((), {"sampling": SAMPLING | {"response_format": {"type": "json_object"}}}),
])
async def test_what_cant_be_continued_exactly_goes_through_chat(without: Any, changes: Any):
    async with Fake(without=without) as fake, client_of(fake.url) as client:
        prior = await ask(client)
        turn = await ask(client, **second_turn(prior), **changes)
        assert fake.asked("/v1/chat/completions")[-1]["messages"][-1]["content"] == "Why?"
        assert turn.token_ids
        assert not extends(prior, turn)


@pytest.mark.parametrize(("without", "stop"), [
    (("/inference/v1/generate",), None), ((), ["x"]),
])
async def test_completions_stand_in_for_generate(without: tuple[str, ...], stop: Any):
    async with Fake(without=without) as fake, client_of(fake.url) as client:
        prior = await ask(client)
        sampling = SAMPLING | {"stop": stop} if stop else SAMPLING
        turn = await ask(client, **second_turn(prior), sampling=sampling)
        assert extends(prior, turn)
        assert (turn.text, turn.versions) == ("seven", [])
        assert fake.asked("/v1/completions")[-1].get("stop") == stop


async def test_a_later_turn_beyond_the_context_overflows_and_its_budget_is_cut():
    async with Fake() as fake, client_of(fake.url) as client:
        prior = await ask(client)
        fake.context = 60
        await ask(client, **second_turn(prior), sampling={"max_tokens": 100})
        sent = fake.asked("/inference/v1/generate")[-1]
        assert sent["sampling_params"]["max_tokens"] == 60 - len(sent["token_ids"]) > 0
        fake.context = len(sent["token_ids"])
        with pytest.raises(ContextOverflow, match=f"context {fake.context}"):
            await ask(client, **second_turn(prior))


# What a server can do


async def test_capabilities_are_asked_once_even_by_many():
    async with Fake() as fake, client_of(fake.url) as client:
        found = await asyncio.gather(*(client.capabilities("m") for _ in range(5)))
        assert all(one is found[0] for one in found)
        assert len(fake.asked("/v1/models")) == 1
        assert found[0].server == "vllm 0.32.0"
        assert (await client.capabilities(None)).token_ids
        tokens = sum(body.get("max_tokens", 0) for body in fake.asked("/v1/chat/completions"))
        assert tokens == 6


async def test_what_is_missing_is_said_in_the_servers_words():
    fake = Fake(without=("/inference/v1/generate", "/tokenize"))
    async with fake, client_of(fake.url) as client:
        found = await client.capabilities("m")
    assert (found.generate_route, found.tokenize, found.token_ids) == (False, False, True)
    assert "404: Not Found" in found.detail["generate_route"]
    assert "404: Not Found" in found.detail["tokenize"]


async def test_a_fault_while_asking_is_no_finding(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(endpoints, "PAUSE_S", 0.1)
    async with Fake() as fake, client_of(fake.url) as client:
        fake.always = answer_with(500, "starting")
        with pytest.raises(InferenceError, match="starting"):
            await client.capabilities("m")
        fake.always = None
        assert (await client.capabilities("m")).token_ids


# Text only


class TextOnly(Fake):
    """An OpenAI-compatible API of a strict kind."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else {}
        self.seen.append((request.path, body))
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "gpt"}]})
        if request.path != "/v1/chat/completions":
            return web.Response(status=404, text="<h1>Not Found</h1>")
        if "return_token_ids" in body:
            return refusal(400, "Unrecognized request argument supplied: return_token_ids")
        if "max_tokens" in body:
            return refusal(400, "Unsupported parameter: 'max_tokens' is not supported with this "
                                "model. Use 'max_completion_tokens' instead.")
        if body.get("temperature", 1) != 1:
            return refusal(400, "Unsupported value: 'temperature' does not support 0.5 with this "
                                "model. Only the default (1) value is supported.")
        choice = {"message": {"role": "assistant", "content": "seven"}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": {"completion_tokens": 1}})


async def test_a_text_only_server_teaches_once():
    async with TextOnly() as server, client_of(server.url) as client:
        sampling = SAMPLING | {"temperature": 0.5}
        request = {"model": "gpt", "want_tokens": False, "sampling": sampling}
        first = await ask(client, **request)
        assert (first.text, first.token_ids, first.usage.completion_tokens) == ("seven", None, 1)
        assert first.attempts == 3
        assert client.dropped_parameters("gpt") == {"temperature"}
        again = await ask(client, **request)
        assert again.attempts == 1
        assert server.seen[-1][1] == {
            "model": "gpt", "messages": QUESTION, "max_completion_tokens": 8, "seed": 7,
        }


async def test_many_at_once_learn_the_same_lesson():
    async with TextOnly() as server, client_of(server.url) as client:
        done = await asyncio.gather(
            *(ask(client, model="gpt", want_tokens=False) for _ in range(8))
        )
        assert [one.text for one in done] == ["seven"] * 8


async def test_a_text_only_server_can_nothing_else_and_gives_no_tokens():
    async with TextOnly() as server, client_of(server.url) as client:
        found = await client.capabilities("gpt")
        assert (found.token_ids, found.generate_route, found.prompt_logprobs) == (False,) * 3
        assert "return_token_ids" in found.detail["token_ids"]
        assert "Not Found" in found.detail["tokenize"]
        with pytest.raises(InferenceError, match="return_token_ids"):
            await ask(client, model="gpt")


async def test_a_lesson_is_never_applied_where_tokens_are_wanted():
    async with Fake() as fake, client_of(fake.url) as client:
        fake.always = answer_with(400, "temperature is not supported")
        with pytest.raises(InferenceError, match="not supported"):
            await ask(client)
        assert len(fake.seen) == 1
