"""Starts real vLLM with the options that the pipelines need, and keeps it running.

    python -m rollstream.services.engine --backend vllm --vllm-python .venv-vllm/bin/python

vLLM lives in an environment of its own (`--vllm-python`) and in a process group of its own: its
engine processes outlive a killed server and would hold the GPU, so all of them end with it. It is
started again when it dies; not where it has never become ready.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp

from rollstream.services.engine.convert import (
    SMOLLM2,
    ModelNotFound,
    default_cache,
    locate,
    prepare,
)
from rollstream.services.engine.ending import Ending
from rollstream.services.engine.options import Fault, bound_socket

START_S = 900.0
"""A big model is loaded for minutes."""
GRACE_S = 20.0
LOOK_S = 0.5
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


def vllm_command(options: argparse.Namespace, model: str, port: int) -> list[str]:
    """vLLM's API server: token ids in and out, the sampler's own logprobs, priorities."""
    return [
        options.vllm_python or sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--model", model, "--served-model-name", options.served_model_name,
        "--host", options.host, "--port", str(port),
        "--max-model-len", str(options.max_model_len),
        "--max-logprobs", str(options.max_logprobs),
        "--enable-scale-out", "--enable-request-id-headers",
        "--scheduling-policy", "priority", "--logprobs-mode", "processed_logprobs",
        *shlex.split(options.vllm_flags),
    ]


def check_vllm(options: argparse.Namespace) -> str:
    """One line that says what would be served. Raises Fault."""
    python = options.vllm_python or sys.executable
    if options.script:
        raise Fault("--backend vllm: --script belongs to the numpy backend")
    try:
        found = subprocess.run(
            [python, "-c", "import importlib.util as u, sys; sys.exit(not u.find_spec('vllm'))"],
            timeout=60, capture_output=True,
        )
    except OSError as error:
        raise Fault(f"--vllm-python {python}: {error.strerror}") from error
    if found.returncode:
        raise Fault(
            f"--backend vllm: vllm isn't installed for {python}; name another --vllm-python"
        )
    bound_socket(options.host, options.port).close()
    return f"engine can start: vLLM with {options.model} as {options.served_model_name}"


async def serve_vllm(options: argparse.Namespace) -> int:
    """Serve until told to end (0), or until it can't be started (1). Raises Fault."""
    check_vllm(options)
    ending = Ending(options.parent_pid)
    model = await asyncio.to_thread(_model, options)
    sock = bound_socket(options.host, options.port)
    port = sock.getsockname()[1]
    sock.close()
    pause_s, was_ready = FIRST_PAUSE_S, False
    while not ending.reached:
        process = _start(vllm_command(options, model, port))
        try:
            if await _ready(process, options.host, port, ending):
                was_ready, pause_s = True, FIRST_PAUSE_S
                url = f"http://{options.host}:{port}/v1"
                print(f"engine ready on {url} model={options.served_model_name}", flush=True)
                while process.poll() is None and not await ending.wait(timeout_s=LOOK_S):
                    pass
        finally:
            await asyncio.to_thread(_end, process)
        if ending.reached:
            return 0
        print(f"engine: vLLM ended with {process.returncode}", file=sys.stderr, flush=True)
        if not was_ready:
            return 1
        await ending.wait(timeout_s=pause_s)
        pause_s = min(LONGEST_PAUSE_S, pause_s * 2)
    return 0


def _model(options: argparse.Namespace) -> str:
    """What vLLM takes for a model: a GGUF of ours is written as a Hugging Face folder first."""
    if options.model != SMOLLM2 and Path(options.model).suffix != ".gguf":
        return options.model
    from rollstream.services.engine.hugging_face import hugging_face_folder

    try:
        gguf = locate(options.model)
        return str(hugging_face_folder(prepare(gguf, options.cache or default_cache())))
    except (ModelNotFound, ValueError, OSError) as error:
        raise Fault(f"--model {options.model}: {error}") from error


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    # The control routes (pause, reload, version) are off without the first.
    environment = {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", **os.environ}
    if not Path(command[command.index("--model") + 1]).is_dir():
        environment.pop("HF_HUB_OFFLINE")
    # Its prints are no answers of ours: whoever starts us reads one line, `engine ready`.
    return subprocess.Popen(
        command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
    )


async def _ready(
    process: subprocess.Popen[bytes], host: str, port: int, ending: Ending
) -> bool:
    """Whether it serves; not where it ends before, or takes too long."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + START_S
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        while process.poll() is None and loop.time() < until_s:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"http://{host}:{port}/health") as answer:
                    if answer.status == 200:
                        return True
            if await ending.wait(timeout_s=LOOK_S):
                return False
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it with all its processes, those included that a killed server left behind."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(GRACE_S)
