"""New weights reach endpoints step by step, whatever happened to the one who began."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fake_vllm import Fake, ask, client_of, refusal
from making import run

from rollstream.services.generator import updates
from rollstream.services.generator.updates import Updater
from rollstream.shared.control import PolicyLive, PolicyVersion
from rollstream.shared.inference import endpoints
from rollstream.shared.inference.client import InferenceClient
from rollstream.shared.inference.types import ServerUnavailable
from rollstream.shared.inference.weights import Adapters, NamedWeights
from rollstream.shared.policy import LOADING, Policy
from rollstream.shared.records import VersionSpan
from rollstream.shared.role import Active
from rollstream.shared.runs import Updates

pytestmark = pytest.mark.usefixtures("fast")


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "LOOK_S", 0.02)
    monkeypatch.setattr(updates, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(endpoints, "STALE_S", 0.02)


class Endpoint(Fake):
    """A vLLM with weights that can be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.label, self.paused, self.weights = "default", False, ""
        self.adapters: list[str] = []
        self.broken = False
        self.labels_when_asked: list[str] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/chat/completions":
            self.labels_when_asked.append(self.label)
        return await super().handle(request)

    def weight_info(self, _: Any) -> Any:
        return {"weight_version": self.label}

    def update_weight_version(self, body: Any) -> Any:
        self.label = body["new_version"]
        return {}

    def pause(self, _: Any) -> Any:
        self.paused = True
        return {}

    def resume(self, _: Any) -> Any:
        self.paused = False
        return {}

    def is_paused(self, _: Any) -> Any:
        return {"is_paused": self.paused}

    def reset_prefix_cache(self, _: Any) -> Any:
        return {}

    def collective_rpc(self, body: Any) -> Any:
        assert self.paused
        assert self.label == LOADING, "weights that are being replaced are of no version"
        if self.broken:
            return refusal(500, "no such file")
        self.weights = body["kwargs"]["weights_path"]
        return {"results": [None]}

    def v1_models(self, _: Any) -> Any:
        found = super().v1_models(_)
        return {"data": [*found["data"], *({"id": name} for name in self.adapters)]}

    def v1_load_lora_adapter(self, body: Any) -> Any:
        self.adapters.append(body["lora_name"])
        return {}

    def v1_unload_lora_adapter(self, body: Any) -> Any:
        self.adapters.remove(body["lora_name"])
        return {}


class Told:
    """A writer that keeps what it is given."""

    def __init__(self) -> None:
        self.records: list[Any] = []

    async def send(self, topic: str, partition: int, record: Any) -> int:
        self.records.append(record)
        return len(self.records)


class Office:
    """An updater at work until the block ends."""

    def __init__(self, client: InferenceClient, policy: Policy, **fields: Any) -> None:
        config = run(updates=Updates(**fields))
        self.told = Told()
        self._updater = Updater(config, client, policy)
        self._active = Active(None, self.told, "control")  # type: ignore[arg-type]

    async def __aenter__(self) -> Office:
        self._task = asyncio.create_task(self._updater.run(self._active))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    async def until(self, what: Any) -> None:
        async with asyncio.timeout(10):
            while not what():
                assert not self._task.done(), self._task.exception()
                await asyncio.sleep(0.01)


def announced(version: int) -> Policy:
    policy = Policy()
    policy.apply(PolicyVersion(version=version, weights=f"/w/{version}"))
    return policy


async def test_every_endpoint_gets_the_weights_and_says_so(tmp_path: Path):
    async with Endpoint() as one, Endpoint() as two, client_of(one.url, two.url) as client:
        policy = announced(4)
        async with Office(client, policy, method="reload") as office:
            await office.until(lambda: len(office.told.records) == 2)
            for endpoint in (one, two):
                assert (endpoint.label, endpoint.weights, endpoint.paused) == ("4", "/w/4", False)
            urls = {endpoint.url.removesuffix("/v1") for endpoint in (one, two)}
            assert office.told.records == [
                PolicyLive(url=url, label="4") for url in client.in_flight()
            ]
            assert policy.live.keys() == urls
            # One starts again, with what it had first.
            one.label, one.weights = "default", ""
            await office.until(lambda: one.weights == "/w/4" and one.label == "4")
            assert len([seen for seen in one.seen if seen[0] == "/collective_rpc"]) == 2
            assert len([seen for seen in two.seen if seen[0] == "/collective_rpc"]) == 1


@pytest.mark.parametrize(("label", "paused"), [("4", True), (LOADING, True), (LOADING, False)])
async def test_what_a_killed_updater_left_is_completed(label: str, paused: bool):
    async with Endpoint() as endpoint, client_of(endpoint.url) as client:
        endpoint.label, endpoint.paused = label, paused
        async with Office(client, announced(4), method="reload") as office:
            await office.until(lambda: office.told.records)
        assert (endpoint.label, endpoint.paused) == ("4", False)
        assert endpoint.weights == ("" if label == "4" else "/w/4")


async def test_weights_that_cant_be_loaded_are_never_asked():
    async with Endpoint() as endpoint, client_of(endpoint.url) as client:
        policy = announced(4)
        client.due = NamedWeights(policy, client.weights)
        endpoint.broken = True
        async with Office(client, policy, method="reload") as office:
            await office.until(lambda: endpoint.asked("/collective_rpc"))
            with pytest.raises(ServerUnavailable, match="has the weights loading, due are 4"):
                await ask(client, deadline_s=0.3)
            assert not endpoint.paused, "what was under way goes on"
            endpoint.broken = False
            done = await ask(client, deadline_s=10.0)
        assert done.versions == [VersionSpan(4, 0, 2)]
        assert set(endpoint.labels_when_asked) == {"4"}
        assert office.told.records


async def test_a_trainer_that_moves_them_itself_is_only_believed_when_the_endpoint_says_so():
    async with Endpoint() as endpoint, client_of(endpoint.url) as client:
        policy = announced(4)
        client.due = NamedWeights(policy, client.weights)
        async with Office(client, policy, method="trainer") as office:
            asking = asyncio.create_task(ask(client, deadline_s=10.0))
            await asyncio.sleep(0.2)
            assert (endpoint.labels_when_asked, office.told.records) == ([], [])
            endpoint.label = "4"
            await asking
            await office.until(lambda: office.told.records)
        assert endpoint.labels_when_asked == ["4"]
        assert endpoint.asked("/collective_rpc") == []


async def test_an_answer_of_an_endpoint_that_started_again_meanwhile_is_not_used():
    async with Endpoint() as endpoint, client_of(endpoint.url) as client:
        policy = announced(4)
        client.due = NamedWeights(policy, client.weights)
        endpoint.label = "4"

        def start_again(_: Any) -> None:
            endpoint.label, endpoint.edit = "default", lambda answer: None

        endpoint.edit = lambda answer: start_again(answer) if "choices" in answer else None
        async with Office(client, policy, method="reload"):
            done = await ask(client, deadline_s=10.0)
        assert done.versions == [VersionSpan(4, 0, 2)]
        assert endpoint.labels_when_asked == ["4", "4"]


async def test_adapters_have_a_name_a_version_and_old_ones_go():
    async with Endpoint() as endpoint, client_of(endpoint.url) as client:
        policy = announced(1)
        adapters = Adapters(policy, client.weights, "r")
        client.due = adapters
        async with Office(client, policy, method="lora") as office:
            for version in (1, 2, 3):
                policy.apply(PolicyVersion(version=version, weights=f"/w/{version}"))
                await office.until(lambda v=version: len(office.told.records) == v)
        assert endpoint.adapters == ["r-2", "r-3"]
        loaded = [body["lora_path"] for body in endpoint.asked("/v1/load_lora_adapter")]
        assert loaded == ["/w/1", "/w/2", "/w/3"]
