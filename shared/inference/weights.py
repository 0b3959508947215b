"""A server's weights by vLLM's own routes: which it has, and new ones from files.

Routes of vLLM 0.32 with VLLM_SERVER_DEV_MODE=1; adapters with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1
and --enable-lora.
"""

from __future__ import annotations

import time
from typing import Literal

import msgspec

from rollstream.shared.inference import bodies, dialects
from rollstream.shared.inference.transport import Transport
from rollstream.shared.policy import LOADING, Policy

CALL_S = 600.0
"""A big model is loaded for minutes."""


class WeightRoutes:
    """Asks single servers of a service about their weights. Everything raises InferenceError."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def label(self, url: str, until: float) -> str:
        """The label of the weights that it has."""
        body = await self._transport.exchange("GET", url + bodies.WEIGHT_INFO, None, until)
        return dialects.parse_weight_version(body)

    async def reload(
        self, url: str, label: str, folder: str, in_flight: Literal["keep", "abort"]
    ) -> None:
        """Load the files and take the label, paused meanwhile; again after a kill in between.

        While it loads it has no version's label: a half-loaded model is never asked.
        """
        until = time.monotonic() + CALL_S
        await self._post(url, f"/pause?mode={in_flight}", {}, until)
        try:
            await self._post(url, "/update_weight_version", {"new_version": LOADING}, until)
            await self._post(url, "/collective_rpc", {
                "method": "reload_weights", "kwargs": {"weights_path": folder},
            }, until)
            await self._post(url, "/reset_prefix_cache", {}, until)
            await self._post(url, "/update_weight_version", {"new_version": label}, until)
        finally:
            await self.resume(url)

    async def resume(self, url: str) -> None:
        """Go on, if whoever paused it did not live to say so."""
        until = time.monotonic() + CALL_S
        paused = await self._transport.exchange("GET", url + "/is_paused", None, until)
        if msgspec.json.decode(paused) == {"is_paused": True}:
            await self._post(url, "/resume", {}, until)

    async def models(self, url: str, until: float) -> list[str]:
        """The models that it lists, adapters included."""
        body = await self._transport.exchange("GET", url + bodies.MODELS, None, until)
        return dialects.parse_models(body)[0]

    async def load_adapter(self, url: str, name: str, folder: str) -> None:
        """Serve an adapter under a name of its own."""
        until = time.monotonic() + CALL_S
        await self._post(url, "/v1/load_lora_adapter", {
            "lora_name": name, "lora_path": folder,
        }, until)

    async def unload_adapter(self, url: str, name: str) -> None:
        """Serve it no more."""
        until = time.monotonic() + CALL_S
        await self._post(url, "/v1/unload_lora_adapter", {"lora_name": name}, until)

    async def _post(self, url: str, path: str, body: dict[str, object], until: float) -> None:
        await self._transport.exchange("POST", url + path, msgspec.json.encode(body), until)


class NamedWeights:
    """A server has the due weights where it says so by their label (`transport.Due`)."""

    def __init__(self, policy: Policy, routes: WeightRoutes) -> None:
        self._policy = policy
        self._routes = routes

    @property
    def label(self) -> str:
        return self._policy.label

    async def confirm(self, url: str, until: float) -> str:
        return await self._routes.label(url, until)


class Adapters:
    """A server has the due weights where it lists the adapter of their name (`transport.Due`)."""

    def __init__(self, policy: Policy, routes: WeightRoutes, run: str) -> None:
        self._policy = policy
        self._routes = routes
        self._run = run

    @property
    def label(self) -> str:
        return self._policy.label

    def name(self, label: str) -> str:
        """The adapter's: never used for other weights."""
        return f"{self._run}-{label}"

    async def confirm(self, url: str, until: float) -> str:
        label = self.label
        there = self.name(label) in await self._routes.models(url, until)
        return label if there else "without its adapter"
