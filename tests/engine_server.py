"""The engine as a process of its own, and a small client that asks it over HTTP."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from typing import Any

import aiohttp

MODEL = "smollm2-135m"
ASK = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = [504, 3575, 282, 4649, 314, 7042, 30, 2]  # "The capital of France is Paris." and the end
EXAMPLES = [(12, 25), (31, 17)]


class Server:
    """An engine process and what it printed when it was ready."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "rollstream.services.engine", "--port", "0", *flags]
        command += ["--parent-pid", str(os.getpid())]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.ready = self.process.stdout.readline()
        if "engine ready on" not in self.ready:
            raise RuntimeError(f"the engine did not start: exit code {self.process.wait(10)}")
        self.url = self.ready.split()[3].removesuffix("/v1")

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(15)


class Client:
    """Asks one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str, backend: str = "numpy") -> None:
        self.session, self.url, self.backend = session, url, backend

    async def get(self, route: str) -> Any:
        async with self.session.get(self.url + route) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json(content_type=None) if answer.content_length else None

    async def post(self, route: str, status: int = 200, headers: Any = None, **body: Any) -> Any:
        url = self.url + route
        async with self.session.post(url, json=body, headers=headers) as answer:
            assert answer.status == status, await answer.text()
            return await answer.json(content_type=None) if answer.content_length else None

    async def chat(self, **body: Any) -> Any:
        return await self.post("/v1/chat/completions", **({"model": MODEL, "messages": ASK} | body))

    async def generate(self, token_ids: list[int], **sampling: Any) -> Any:
        body = {"model": MODEL, "token_ids": token_ids, "sampling_params": sampling}
        return await self.post("/inference/v1/generate", **body)

    async def metric(self, name: str) -> int:
        async with self.session.get(self.url + "/metrics") as answer:
            lines = (await answer.text()).splitlines()
        mine = (line for line in lines if line.startswith(f"vllm:{name}{{"))
        return sum(int(float(line.split()[-1])) for line in mine)

    async def until(self, name: str, low: int, high: int | None = None) -> None:
        """Waits for a metric to lie within low..high (just low where no high is given)."""
        high = low if high is None else high
        deadline = time.monotonic() + 20
        while not low <= await self.metric(name) <= high:
            assert time.monotonic() < deadline, f"{name} never became {low}"
            await asyncio.sleep(0.02)


def addition(a: int, b: int) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": "Answer with the equation."}]
    for x, y in EXAMPLES:
        messages += [{"role": "user", "content": f"What is {x} + {y}?"},
                     {"role": "assistant", "content": f"{x} + {y} = {x + y}"}]
    return [*messages, {"role": "user", "content": f"What is {a} + {b}?"}]
