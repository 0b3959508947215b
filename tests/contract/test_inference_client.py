"""The client against servers over real HTTP: a fake in vLLM's dialect, this project's engine, and
any server named by INFERENCE_URL (model: INFERENCE_MODEL)."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Self

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollstream.shared.inference import endpoints, transport
from rollstream.shared.inference.client import InferenceClient
from rollstream.shared.inference.continuation import extends, follows
from rollstream.shared.inference.faults import DeadlinePassed
from rollstream.shared.inference.types import (
    Completion,
    ContextOverflow,
    InferenceError,
    ServerUnavailable,
)
from rollstream.shared.records import VersionSpan

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
START, END, SEVEN = 1, 2, 3  # SEVEN is one sampled token that reads "seven"
QUESTION = [{"role": "user", "content": "3 + 4?"}]
SAMPLING = {"max_tokens": 8, "temperature": 1.0}


def ids_of(messages: list[dict[str, Any]]) -> list[int]:
    """The fake's template and tokenizer: a token a character, special tokens around a message."""
    ids: list[int] = []
    for message in messages:
        text = f"{message['role']}\n{message['content']}"
        ids += [START, *map(ord, text), END, ord("\n")]
    return [*ids, START, *map(ord, "assistant\n")]


def refusal(status: int, message: str, **fields: Any) -> web.Response:
    error = {"message": message, "type": "x", "param": None, "code": status} | fields
    return web.json_response({"error": error}, status=status)


class Fake:
    """A server in vLLM's dialect that always says "seven", after its `faults` in turn."""

    def __init__(self, *, without: tuple[str, ...] = (), context: int = 400) -> None:
        self.without, self.context = without, context
        self.faults: list[Handler] = []
        self.always: Handler | None = None
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.keys: set[str | None] = set()
        self.connections: set[Any] = set()
        self.sampled = [SEVEN, END]
        self.finish = "stop"
        self.edit: Callable[[dict[str, Any]], Any] = lambda answer: None
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        self.server = TestServer(app)

    async def __aenter__(self) -> Self:
        await self.server.start_server()
        self.url = str(self.server.make_url("/v1"))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.close()

    def asked(self, path: str) -> list[dict[str, Any]]:
        return [body for at, body in self.seen if at == path]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else {}
        self.seen.append((request.path, body))
        self.keys.add(request.headers.get("Authorization"))
        self.connections.add(request.transport)
        if self.faults:
            return await self.faults.pop(0)(request)
        if self.always:
            return await self.always(request)
        if request.path in self.without:
            return refusal(404, "Not Found")
        if body.get("model", "m") != "m":
            return refusal(404, f"The model `{body['model']}` does not exist.")
        answer = getattr(self, request.path.strip("/").replace("/", "_"))(body)
        if isinstance(answer, web.Response):
            return answer
        self.edit(answer)
        return web.json_response(answer)

    def v1_models(self, _: Any) -> Any:
        return {"data": [{"id": "m", "owned_by": "vllm"}]}

    def version(self, _: Any) -> Any:
        return {"version": "0.32.0"}

    def tokenize(self, body: Any) -> Any:
        return {"tokens": ids_of(body["messages"]), "max_model_len": self.context}

    def detokenize(self, body: Any) -> Any:
        return {"prompt": "".join("seven" if i == SEVEN else chr(i) for i in body["tokens"])}

    def v1_chat_completions(self, body: Any) -> Any:
        prompt = ids_of(body["messages"])
        if len(prompt) + body.get("max_tokens", 1) > self.context:
            words = f"This model's maximum context length is {self.context} tokens."
            return refusal(400, words)
        message = {"role": "assistant", "content": "seven"}
        choice = self._choice() | {"message": message}
        if not body.get("return_token_ids"):
            return {"choices": [choice | {"token_ids": None, "logprobs": None}]}
        return {"choices": [choice], "prompt_token_ids": prompt}

    def inference_v1_generate(self, body: Any) -> Any:
        spans = [{"version": "5", "start": 0, "end": len(self.sampled)}]
        return {"choices": [self._choice() | {"weight_versions": spans}]}

    def v1_chat_completions_derender(self, body: Any) -> Any:
        ids = body["generate_response"]["choices"][0]["token_ids"]
        assert ids == self.sampled
        message: dict[str, Any] = {"role": "assistant", "content": "derendered"}
        message["reasoning"] = "hm"
        if body["chat_request"].get("tools"):
            message["tool_calls"] = [{"function": {"name": "f", "arguments": "{}"}}]
        return {"choices": [{"message": message, "finish_reason": "stop"}]}

    def v1_completions(self, body: Any) -> Any:
        k, ids = body.get("prompt_logprobs"), body["prompt"]
        choice = self._choice(top="token_logprobs") | {"text": "seven", "prompt_token_ids": ids}
        if k is not None:
            if k > 20:
                words = f"Requested prompt logprobs of {k}, which is greater than max allowed: 20"
                return refusal(400, words)
            own = [{str(i): {"logprob": -9.0, "rank": 99}} for i in ids]
            best = {str(200 + r): {"logprob": -1.0 - r, "rank": r} for r in range(1, k + 1)}
            choice["prompt_logprobs"] = [None, *({**entry, **best} for entry in own[1:])]
        return {"choices": [choice]}

    def _choice(self, top: str = "content") -> dict[str, Any]:
        values = [-0.5 - n for n in range(len(self.sampled))]
        told = values if top == "token_logprobs" else [{"logprob": v} for v in values]
        return {"finish_reason": self.finish, "token_ids": self.sampled, "logprobs": {top: told}}


def client_of(*urls: str, key: str | None = None, **changes: Any) -> InferenceClient:
    limits = {"max_concurrent": 16, "request_timeout_s": 20.0} | changes
    return InferenceClient(list(urls), api_key=key, **limits)


async def ask(client: InferenceClient, **changes: Any) -> Completion:
    request: dict[str, Any] = {
        "model": "m", "sampling": SAMPLING, "seed": 7, "deadline_s": 20.0, "want_tokens": True,
    }
    return await client.chat(changes.pop("messages", QUESTION), **request | changes)


def answer_with(status: int, message: str = "x", **fields: Any) -> Handler:
    async def handler(_: web.Request) -> web.StreamResponse:
        return refusal(status, message, **fields)

    return handler


async def drop(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def break_off(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"choices": [')
    assert request.transport is not None
    request.transport.close()
    return response


async def stall(_: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    return web.Response()


@pytest.fixture(autouse=True)
def _without_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "BACKOFF_S", 0.01)


# What every server in vLLM's dialect must do


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    folder = tmp_path_factory.mktemp("engine")
    (folder / "script.jsonl").write_text('{"text": "3 + 4 = seven"}\n')
    command = [sys.executable, "-m", "rollstream.services.engine", "--port", "0"]
    command += ["--script", str(folder / "script.jsonl"), "--parent-pid", str(os.getpid())]
    with (folder / "output").open("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 60
            while True:
                said = (folder / "output").read_text()
                if ready := re.search(r"engine ready on (\S+) model=(\S+)", said):
                    break
                if process.poll() == 2:
                    pytest.skip(f"the engine can't start here: {said}")
                assert process.poll() is None, said
                assert time.monotonic() < deadline, f"the engine isn't ready: {said}"
                time.sleep(0.1)
            yield ready[1], ready[2]
        finally:
            process.terminate()
            process.wait(10)


@pytest.fixture(params=["fake", "engine", "outside"])
async def served(request: pytest.FixtureRequest) -> AsyncIterator[tuple[str, str]]:
    if request.param == "fake":
        async with Fake() as fake:
            yield fake.url, "m"
    elif request.param == "engine":
        yield request.getfixturevalue("engine")
    elif url := os.environ.get("INFERENCE_URL"):
        yield url, os.environ["INFERENCE_MODEL"]
    else:
        pytest.skip("INFERENCE_URL names no server")


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
        assert "logprobs_mode" in found.detail


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


# Faults


@pytest.mark.parametrize("fault", [
    answer_with(500), answer_with(429), answer_with(408), answer_with(503), drop, break_off,
])
async def test_what_may_pass_is_tried_again(fault: Handler):
    async with Fake() as fake, client_of(fake.url) as client:
        fake.faults = [fault, fault]
        done = await ask(client)
        assert (done.attempts, done.text, done.endpoint) == (3, "seven", fake.url[: -len("/v1")])
        first, *again = fake.asked("/v1/chat/completions")
        assert again == [first, first]  # the seed too


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
async def test_what_wont_pass_is_not(status: int):
    async with Fake() as fake, client_of(fake.url, key="secret") as client:
        fake.always = answer_with(status, "these words")
        with pytest.raises(InferenceError, match=f"{status}: these words") as refused:
            await ask(client)
        assert (refused.value.status, refused.value.retryable) == (status, False)
        assert len(fake.seen) == 1
        assert "secret" not in str(refused.value) + repr(vars(client))
        assert fake.keys == {"Bearer secret"}


async def test_attempts_end():
    async with Fake() as fake, client_of(fake.url) as client:
        fake.always = answer_with(500, "out of memory")
        with pytest.raises(InferenceError, match="out of memory") as failed:
            await ask(client, max_attempts=2)
        assert failed.value.retryable
        assert len(fake.seen) == 2


async def test_another_endpoint_first_and_without_delay(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(transport, "BACKOFF_S", 1e9)
    monkeypatch.setattr(transport, "BACKOFF_MAX_S", 1e9)
    async with Fake() as bad, Fake() as good, client_of(bad.url, good.url) as client:
        bad.always = answer_with(500)
        for n in range(12):
            done = await ask(client, sticky=f"g{n}", max_attempts=2)
            assert done.endpoint in good.url
        assert 0 < len(bad.seen) <= 3  # then it is left out


async def test_a_dead_endpoint_beside_a_live_one():
    async with Fake() as gone:
        pass
    async with Fake() as live, client_of(gone.url, live.url) as client:
        await client.wait_until_up(10.0)
        done = [await ask(client, sticky=f"g{n}") for n in range(8)]
        assert {one.endpoint for one in done} == {live.url[: -len("/v1")]}
        assert max(one.attempts for one in done) == 2


async def test_nothing_but_dead_endpoints():
    async with Fake() as gone:
        pass
    async with client_of(gone.url) as client:
        with pytest.raises(ServerUnavailable, match=r"127\.0\.0\.1"):
            await ask(client)
        # It is paused now, for longer than this deadline: no use waiting.
        with pytest.raises(ServerUnavailable, match="before the deadline"):
            await ask(client, deadline_s=endpoints.PAUSE_S / 5)
        with pytest.raises(ServerUnavailable, match=r"up at http://127.* after 0.1 s; last error"):
            await client.wait_until_up(0.1)


async def test_waiting_until_up_outlasts_a_start_and_costs_no_tokens():
    async with Fake() as fake, client_of(fake.url) as client:
        fake.faults = [answer_with(503), answer_with(503)]
        await client.wait_until_up(10.0)
        assert [path for path, _ in fake.seen] == ["/v1/models"] * 3
        fake.always = answer_with(401, "who are you")
        with pytest.raises(InferenceError, match="who are you"):
            await client.wait_until_up(10.0)


async def test_a_server_that_stalls_past_the_deadline():
    async with Fake() as fake, client_of(fake.url) as client:
        fake.always = stall
        started = time.monotonic()
        with pytest.raises(DeadlinePassed):
            await ask(client, deadline_s=0.2)
        assert 0.2 <= time.monotonic() - started < 10
        assert client.in_flight() == {fake.url[: -len("/v1")]: 0}


async def test_a_server_that_stalls_past_the_requests_own_limit_is_left():
    async with Fake() as bad, Fake() as good:
        bad.always = stall
        async with client_of(bad.url, good.url, request_timeout_s=0.3) as client:
            done = [await ask(client, sticky=f"g{n}") for n in range(12)]
            assert {one.endpoint for one in done} == {good.url[: -len("/v1")]}
            assert bad.seen


async def test_a_callers_deadline_says_nothing_of_the_server():
    async with Fake() as fake, client_of(fake.url) as client:
        fake.faults = [stall] * 3
        for _ in range(3):
            with pytest.raises(DeadlinePassed):
                await ask(client, deadline_s=0.05)
        assert (await ask(client, deadline_s=endpoints.PAUSE_S / 2)).text == "seven"
        fake.faults = [answer_with(500), answer_with(500), stall, answer_with(500)]
        for limit_s, kind in [(20, InferenceError)] * 2 + [(0.05, DeadlinePassed)]:
            with pytest.raises(kind):
                await ask(client, deadline_s=limit_s, max_attempts=1)
        with pytest.raises(InferenceError, match="500"):
            await ask(client, max_attempts=1)
        with pytest.raises(ServerUnavailable, match=r"last error: .* 500: x"):
            await ask(client, deadline_s=endpoints.PAUSE_S / 2)


async def test_patience_that_a_server_asks_for_beyond_the_deadline_is_not_waited_for():
    async def busy(_: web.Request) -> web.StreamResponse:
        return web.Response(status=429, headers={"Retry-After": "3600"})

    async with Fake() as fake, client_of(fake.url) as client:
        fake.always = busy
        with pytest.raises(DeadlinePassed, match="429"):
            await ask(client)


async def test_a_cancelled_call_frees_its_place():
    async with Fake() as fake, client_of(fake.url, max_concurrent=1) as client:
        arrived = asyncio.Event()

        async def arrive_and_stall(request: web.Request) -> web.StreamResponse:
            arrived.set()
            return await stall(request)

        fake.faults = [arrive_and_stall]
        call = asyncio.create_task(ask(client))
        await asyncio.wait_for(arrived.wait(), 10)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert client.in_flight() == {fake.url[: -len("/v1")]: 0}
        assert (await ask(client)).text == "seven"


async def test_the_limit_holds_and_connections_are_kept():
    async with Fake() as fake, client_of(fake.url, max_concurrent=3) as client:
        now, most = 0, 0

        async def slow(_: web.Request) -> web.StreamResponse:
            nonlocal now, most
            now, most = now + 1, max(most, now + 1)
            await asyncio.sleep(0.02)
            now -= 1
            answer = fake.v1_chat_completions({"messages": [], "return_token_ids": True})
            return web.json_response(answer)

        fake.always = slow
        await asyncio.gather(*(ask(client) for _ in range(15)))
        assert most == 3
        assert len(fake.connections) == 3


async def test_waiting_for_a_place_ends_with_the_deadline():
    async with Fake() as fake, client_of(fake.url, max_concurrent=1) as client:
        fake.always = stall
        calls = [ask(client, deadline_s=0.3), ask(client, deadline_s=0.2)]
        first, second = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(first, DeadlinePassed)
        assert isinstance(second, DeadlinePassed)
        assert "max_concurrent" in str(second)
        assert len(fake.seen) == 1


async def test_an_error_sent_as_200_and_a_redirect():
    async def elsewhere(_: web.Request) -> web.StreamResponse:
        raise web.HTTPTemporaryRedirect("http://other.invalid/v1")

    async def failed(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"code": 502, "message": "provider down"}})

    async with Fake() as fake, client_of(fake.url) as client:
        fake.faults = [failed]
        assert (await ask(client)).attempts == 2
        fake.always = elsewhere
        with pytest.raises(InferenceError, match=r"redirects to http://other.invalid/v1"):
            await ask(client)


# Answers that can't be true


async def test_a_server_that_lies_about_lengths():
    async with Fake() as fake, client_of(fake.url) as client:
        fake.edit = lambda answer: answer["choices"][0]["logprobs"]["content"].pop()
        with pytest.raises(InferenceError, match="1 logprobs for 2 token_ids") as lie:
            await ask(client)
        assert not lie.value.retryable
        fake.edit = lambda answer: answer["choices"][0]["prompt_logprobs"].pop()
        with pytest.raises(InferenceError, match="2 positions for 3 tokens"):
            await client.prompt_logprobs([7, 8, 9], 1, model="m", deadline_s=20.0)
        assert len(fake.seen) == 2


async def test_more_logprobs_than_the_server_gives_and_nonsense():
    async with Fake() as fake, client_of(fake.url) as client:
        with pytest.raises(InferenceError, match="max allowed: 20"):
            await client.prompt_logprobs([7, 8], 21, model="m", deadline_s=20.0)
        with pytest.raises(ValueError, match="k=-1"):
            await client.prompt_logprobs([7, 8], -1, model="m", deadline_s=20.0)
        with pytest.raises(ValueError, match="tokens"):
            await client.prompt_logprobs([], 1, model="m", deadline_s=20.0)


# What a server can do


async def test_capabilities_are_asked_once_even_by_many():
    async with Fake() as fake, client_of(fake.url) as client:
        found = await asyncio.gather(*(client.capabilities("m") for _ in range(5)))
        assert all(one is found[0] for one in found)
        assert len(fake.asked("/v1/models")) == 1
        assert found[0].server == "vllm 0.32.0"
        assert (await client.capabilities(None)).token_ids
        tokens = sum(body.get("max_tokens", 0) for body in fake.asked("/v1/chat/completions"))
        assert tokens == 2


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
