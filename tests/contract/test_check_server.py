"""`rollstream check server`: the whole answer of a server that can everything, and of others."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from fake_vllm import Fake, answer_with


async def check(*arguments: str, **variables: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollstream.services.cli", "check", "server", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **variables},
    )
    said, complained = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, said.decode(), complained.decode()


async def test_a_whole_vllm():
    async with Fake() as fake:
        code, said, _ = await check(fake.url, "--for", "rl", "--updates")
    assert code == 0
    assert said.startswith("vllm 0.32.0 at http://")
    assert said.count("  yes\n") == 7
    assert "rl: yes" in said
    assert said.endswith("  VLLM_SERVER_DEV_MODE=1 vllm serve m --enable-scale-out "
                         "--logprobs-mode processed_logprobs\n")


async def test_what_a_teacher_lacks_is_a_finding():
    async with Fake() as fake:
        code, said, _ = await check(fake.url, "--for", "teacher", "--top-k", "64")
        assert (code, "up to 20 a position" in said) == (1, True)
        assert "teacher: no: it allows 20 a position: --max-logprobs 64" in said
        assert (await check(fake.url.removeprefix("http://")))[0] == 0


async def test_an_endpoint_of_the_file_with_its_key(tmp_path: Path):
    async with Fake() as fake:
        file = tmp_path / "rollstream.toml"
        file.write_text(f'[endpoints.big]\nurl = "{fake.url}"\napi_key_env = "BIG_KEY"\n')
        code, said, _ = await check("big", "--config", str(file), BIG_KEY="hush")
        assert code == 0
        assert fake.keys == {"Bearer hush"}
        assert "hush" not in said
        fake.always = answer_with(401, "wrong key")
        code, _, complained = await check(fake.url)
        assert (code, "401: wrong key" in complained) == (2, True)


async def test_nobody_there():
    code, said, complained = await check("http://127.0.0.1:9/v1")
    assert (code, said) == (2, "")
    assert complained.startswith("rollstream check: no inference server is up at")
