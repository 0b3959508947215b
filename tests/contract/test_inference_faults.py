"""The inference client while servers fail, stall, go away, or answer what can't be true."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from aiohttp import web
from fake_vllm import (
    SAMPLING,
    Fake,
    Handler,
    answer_with,
    ask,
    break_off,
    client_of,
    drop,
    stall,
)

from rollstream.shared.inference import endpoints, limits, transport
from rollstream.shared.inference.faults import DeadlinePassed
from rollstream.shared.inference.types import InferenceError, ServerUnavailable

pytestmark = pytest.mark.usefixtures("without_patience")


def sevens(fake: Fake) -> web.Response:
    """What the fake answers when nothing is made to go wrong."""
    answer = fake.v1_chat_completions({"messages": [], "return_token_ids": True})
    return web.json_response(answer)


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
            return sevens(fake)

        fake.always = slow
        await asyncio.gather(*(ask(client) for _ in range(15)))
        assert most == 3
        assert len(fake.connections) == 3


async def test_the_limit_shrinks_while_requests_queue_at_the_server(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(transport, "WATCH_S", 0.02)
    monkeypatch.setattr(limits, "FIRST", 2)
    async with Fake() as fake, client_of(fake.url, max_concurrent=40) as client:
        now, most, waiting = 0, 0, 0

        async def slow(request: web.Request) -> web.StreamResponse:
            nonlocal now, most
            if request.path == "/metrics":
                return web.Response(text=f'vllm:num_requests_waiting{{a="b"}} {waiting}.0\n')
            now, most = now + 1, max(most, now + 1)
            await asyncio.sleep(0.05)
            now -= 1
            return sevens(fake)

        fake.always = slow
        await asyncio.gather(*(ask(client) for _ in range(40)))
        grown, waiting = client.allowed_requests, 7
        assert most > 4
        async with asyncio.timeout(10):
            while client.allowed_requests >= grown:
                await ask(client)


async def test_a_big_request_waits_for_room_and_is_not_overtaken():
    async with Fake() as fake, client_of(fake.url, max_tokens_in_flight=100) as client:
        order: list[int] = []
        small, big = SAMPLING | {"max_tokens": 40}, SAMPLING | {"max_tokens": 500}

        async def say(n: int, sampling: dict[str, Any]) -> None:
            await ask(client, sampling=sampling)
            order.append(n)

        fake.context = 1000
        tasks = [asyncio.create_task(say(n, big if n == 2 else small)) for n in range(6)]
        await asyncio.gather(*tasks)
        assert order.index(2) == 2


async def test_waiting_for_room_takes_nothing_of_a_requests_own_time():
    async with Fake() as fake, client_of(fake.url, max_concurrent=1) as client:

        async def slow(_: web.Request) -> web.StreamResponse:
            await asyncio.sleep(0.3)
            return sevens(fake)

        fake.always = slow
        done = await asyncio.gather(*(ask(client, deadline_s=0.8) for _ in range(5)))
        assert [one.attempts for one in done] == [1] * 5


async def test_waiting_for_room_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(transport, "ROOM_S", 0.2)
    async with Fake() as fake, client_of(fake.url, max_concurrent=1) as client:
        fake.always = stall
        calls = [ask(client, deadline_s=0.5), ask(client, deadline_s=0.5)]
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


async def test_a_name_stands_for_all_its_addresses(monkeypatch: pytest.MonkeyPatch):
    """A server that comes is used, one that goes is not; what can't be looked up stays."""
    there: list[str] = []

    async def addresses(name: str) -> list[str]:
        assert name == "dns+http://vllm.test:8000"
        if not there:
            raise OSError("no such name")
        return list(there)

    monkeypatch.setattr(transport, "addresses", addresses)
    monkeypatch.setattr(transport, "WATCH_S", 0.02)
    monkeypatch.setattr(transport, "LOOK_UP_S", 0.0)
    async with Fake() as one, Fake() as two, client_of("dns+http://vllm.test:8000/v1") as client:
        with pytest.raises(ServerUnavailable):
            await ask(client, deadline_s=0.2)
        there.append(one.url.removesuffix("/v1"))
        await client.wait_until_up(10.0)
        await ask(client)
        there[:] = [two.url.removesuffix("/v1")]
        while not client.in_flight().keys() >= set(there):
            await asyncio.sleep(0.02)
        asked = len(one.asked("/v1/chat/completions"))
        there.clear()
        for _ in range(3):
            await ask(client)
        assert len(two.asked("/v1/chat/completions")) == 3
        assert len(one.asked("/v1/chat/completions")) == asked == 1


async def test_a_real_name_is_looked_up():
    async with Fake() as fake:
        port = fake.url.rsplit(":", 1)[1].removesuffix("/v1")
        async with client_of(f"dns+http://localhost:{port}/v1") as client:
            assert (await ask(client)).text == "seven"
