"""Starts real vLLM with the options that the pipelines need."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys

from rollstream.services.engine.options import Fault, bound_socket


def vllm_command(options: argparse.Namespace) -> list[str]:
    """vLLM's API server: token ids in and out, the sampler's own logprobs, priorities."""
    return [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--model", options.model, "--served-model-name", options.served_model_name,
        "--host", options.host, "--port", str(options.port),
        "--max-model-len", str(options.max_model_len),
        "--max-logprobs", str(options.max_logprobs),
        "--enable-scale-out", "--enable-request-id-headers",
        "--scheduling-policy", "priority", "--logprobs-mode", "processed_logprobs",
    ]


def run_vllm(options: argparse.Namespace) -> None:
    """Becomes vLLM (exec), or says that it could (`--check`). Raises Fault."""
    if importlib.util.find_spec("vllm") is None:
        raise Fault("--backend vllm: vllm isn't installed in this environment; install it there")
    if options.script or options.parent_pid:
        raise Fault("--backend vllm: --script and --parent-pid belong to the numpy backend")
    bound_socket(options.host, options.port).close()
    if options.check:
        print(f"engine can start: vLLM with {options.model}")
        return
    # The control routes (pause, reload, version) are off without this.
    os.environ.setdefault("VLLM_SERVER_DEV_MODE", "1")
    command = vllm_command(options)
    os.execv(command[0], command)
