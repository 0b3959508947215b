"""How fast the CPU engine is: decoding at several widths, and the demo's own workload.

    python bench/engine.py [--cache DIR] [--url http://127.0.0.1:9001/v1] [--widths 1 8 32 64]

Without `--url` it starts an engine of its own. The load average is printed beside the numbers:
on a shared machine compare the engine's CPU seconds rather than the wall clock.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import psutil

MODEL = "smollm2-135m"
EXAMPLES = [(12, 25), (31, 17), (48, 26), (20, 19)]


def demo_messages(a: int, b: int) -> list[dict[str, str]]:
    """Two-digit addition with four example turns."""
    messages = [{"role": "system", "content": "Answer with the equation."}]
    for x, y in EXAMPLES:
        messages += [
            {"role": "user", "content": f"What is {x} + {y}?"},
            {"role": "assistant", "content": f"{x} + {y} = {x + y}"},
        ]
    return [*messages, {"role": "user", "content": f"What is {a} + {b}?"}]


@contextlib.contextmanager
def engine(cache: str | None) -> Iterator[tuple[str, int]]:
    """An engine of our own: its URL and pid."""
    command = [sys.executable, "-m", "rollstream.services.engine", "--port", "0"]
    command += ["--parent-pid", str(os.getpid()), *(["--cache", cache] if cache else [])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        ready = process.stdout.readline()
        if "ready on" not in ready:
            raise SystemExit(f"the engine did not start: {ready!r}")
        yield ready.split()[3], process.pid
    finally:
        process.terminate()
        process.wait(10)


class Bench:
    """Requests to one engine, timed."""

    def __init__(self, session: aiohttp.ClientSession, url: str, pid: int | None) -> None:
        self._session = session
        self._url = url
        self._process = psutil.Process(pid) if pid else None

    async def post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self._session.post(self._url + route, json={"model": MODEL, **body}) as answer:
            if answer.status != 200:
                raise SystemExit(f"{route}: {answer.status} {await answer.text()}")
            return await answer.json()

    async def decode(self, width: int) -> None:
        """`width` requests of 64 tokens at once."""
        body = {
            "messages": [{"role": "user", "content": "Tell me about the sea."}],
            "max_tokens": 64, "temperature": 1.0, "ignore_eos": True, "logprobs": True,
        }
        with self._timed() as times:
            await asyncio.gather(
                *(self.post("/chat/completions", body | {"seed": i}) for i in range(width))
            )
        self._report(f"decode x{width}", times, 64 * width)

    async def demo(self, groups: int, size: int) -> None:
        """Samples as the generator asks for them, then a teacher's scoring of each."""
        questions = [(10 + 7 * g % 40, 10 + 11 * g % 40) for g in range(groups)]
        bodies = [
            {
                "messages": demo_messages(a, b), "max_tokens": 14, "temperature": 1.0,
                "seed": 100 * g + i, "logprobs": True, "return_token_ids": True,
            }
            for g, (a, b) in enumerate(questions)
            for i in range(size)
        ]
        with self._timed() as times:
            answers = await asyncio.gather(*(self.post("/chat/completions", b) for b in bodies))
        texts = [a["choices"][0]["message"]["content"] for a in answers]
        sums = [a + b for a, b in questions for _ in range(size)]
        right = sum(t.split("=")[-1].strip() == str(s) for t, s in zip(texts, sums, strict=True))
        tokens = sum(a["usage"]["completion_tokens"] for a in answers)
        self._report(f"{len(bodies)} samples ({right} right)", times, tokens)
        sequences = [a["prompt_token_ids"] + a["choices"][0]["token_ids"] for a in answers]
        with self._timed() as times:
            await asyncio.gather(*(self._score(sequence) for sequence in sequences))
        scored = sum(len(s) for s in sequences)
        self._report(f"{len(sequences)} scorings (known prefixes)", times, scored)
        await self._session.post(self._url.removesuffix("/v1") + "/reset_prefix_cache")
        with self._timed() as times:
            await asyncio.gather(*(self._score(sequence) for sequence in sequences))
        self._report(f"{len(sequences)} scorings (empty cache)", times, scored)

    async def _score(self, sequence: list[int]) -> None:
        await self.post(
            "/completions",
            {"prompt": sequence, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 8},
        )

    @contextlib.contextmanager
    def _timed(self) -> Iterator[list[float]]:
        times: list[float] = []
        wall, cpu = time.perf_counter(), self._cpu_s()
        yield times
        times += [time.perf_counter() - wall, self._cpu_s() - cpu]

    def _cpu_s(self) -> float:
        return sum(self._process.cpu_times()[:2]) if self._process else 0.0

    def _report(self, name: str, times: list[float], tokens: int) -> None:
        wall, cpu = times
        print(
            f"{name:32} {wall:6.1f} s  {cpu:6.1f} CPU s  {tokens:6} tokens "
            f"{tokens / wall:6.0f} tok/s   load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


async def main(options: argparse.Namespace) -> None:
    """Runs every measurement once."""
    own = contextlib.nullcontext((options.url, None)) if options.url else engine(options.cache)
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    with own as (url, pid):
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            bench = Bench(session, url, pid)
            await bench.decode(1)  # warms up the mapped weights
            for width in options.widths:
                await bench.decode(width)
            await bench.demo(options.groups, 8)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url")
    parser.add_argument("--cache")
    parser.add_argument("--widths", type=int, nargs="*", default=[1, 8, 32, 64])
    parser.add_argument("--groups", type=int, default=8)
    asyncio.run(main(parser.parse_args()))
