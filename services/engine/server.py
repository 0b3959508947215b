"""Puts the engine together and runs it until it is told to stop."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from aiohttp import web

from rollstream.services.engine.convert import ModelNotFound, default_cache, locate, prepare
from rollstream.services.engine.ending import Ending
from rollstream.services.engine.errors import error_middleware
from rollstream.services.engine.options import Fault, bound_socket, require_writable
from rollstream.services.engine.routes import chat, completions, control, generate, status, tokens
from rollstream.services.engine.scheduler import Executor, Scheduler
from rollstream.services.engine.script import BadScript, Script, ScriptExecutor, load_script
from rollstream.services.engine.serving import SERVING, Serving
from rollstream.services.engine.tokenizer import Tokenizer
from rollstream.services.engine.weights import BadWeights, ModelConfig, load_config, load_converted
from rollstream.services.engine.worker import Worker

_MAX_BODY_BYTES = 64 * 1024 * 1024
_SHUTDOWN_S = 1.0
_MB = 1024 * 1024


def check(options: argparse.Namespace) -> str:
    """One line that says what would be served. Raises Fault, as `serve` would."""
    bound_socket(options.host, options.port).close()
    require_writable(options.cache or default_cache())
    _script(options)
    return f"engine can start: {_gguf(options)} as {options.served_model_name}"


async def serve(options: argparse.Namespace) -> None:
    """Serves until SIGTERM, SIGINT or the end of `--parent-pid`. Raises Fault."""
    ending = Ending(options.parent_pid)
    sock = bound_socket(options.host, options.port)
    # In a thread: a first start converts the model, and a signal meanwhile still ends us.
    building = asyncio.ensure_future(asyncio.to_thread(_build, options))
    stopping = asyncio.ensure_future(ending.wait())
    # waits: until the model is loaded or the server told to end
    await asyncio.wait([building, stopping], return_when=asyncio.FIRST_COMPLETED)
    if stopping.done():
        return
    serving = building.result()
    serving.worker.start()
    runner = web.AppRunner(
        application(serving), handler_cancellation=True, access_log=None,
        shutdown_timeout=_SHUTDOWN_S,
    )
    await runner.setup()
    await web.SockSite(runner, sock, backlog=1024).start()
    host, port = sock.getsockname()[:2]
    print(f"engine ready on http://{host}:{port}/v1 model={serving.model}", flush=True)
    try:
        # waits: for as long as the server serves
        await stopping
    finally:
        await runner.cleanup()
        serving.worker.stop()


def application(serving: Serving) -> web.Application:
    """The HTTP side of one served model."""
    app = web.Application(middlewares=[error_middleware], client_max_size=_MAX_BODY_BYTES)
    app[SERVING] = serving
    for family in (chat, completions, control, generate, status, tokens):
        app.add_routes(family.routes)
    return app


def _build(options: argparse.Namespace) -> Serving:
    """Raises Fault."""
    script = _script(options)
    folder = _converted(options)
    config = load_config(folder)
    if options.max_model_len > config.context:
        raise Fault(
            f"--max-model-len {options.max_model_len}: the model's context is {config.context}"
        )
    tokenizer = Tokenizer(folder, bos_token=config.bos_token, eos_token=config.eos_token)
    if script is None:
        executor = _numpy_executor(options, folder)
        prefix_cache, reload = executor.prefix_cache, executor.reload
    else:
        executor, prefix_cache, reload = ScriptExecutor(config.vocab), None, None
    return Serving(
        model=options.served_model_name, tokenizer=tokenizer, eos_token=config.eos_token,
        max_model_len=options.max_model_len, max_logprobs=options.max_logprobs,
        max_waiting=options.max_waiting, prefix_cache=prefix_cache, reload=reload, script=script,
        worker=Worker(_scheduler(options, executor, tokenizer, config)),
    )


def _scheduler(
    options: argparse.Namespace, executor: Executor, tokenizer: Tokenizer, config: ModelConfig
) -> Scheduler:
    return Scheduler(
        executor,
        decode=lambda ids, skip_special: tokenizer.decode(ids, skip_special=skip_special),
        eos_token=config.eos_token,
        max_batch=options.max_batch,
        max_model_len=options.max_model_len,
    )


def _numpy_executor(options: argparse.Namespace, folder: Path):
    from rollstream.services.engine.executor import NumpyExecutor
    from rollstream.services.engine.model import Model

    return NumpyExecutor(
        Model(load_converted(folder), options.max_model_len, options.threads),
        kv_cache_bytes=options.kv_cache_mb * _MB,
        prefix_cache_bytes=options.prefix_cache_mb * _MB,
        max_model_len=options.max_model_len,
        max_logprobs=options.max_logprobs,
    )


def _gguf(options: argparse.Namespace) -> Path:
    try:
        return locate(options.model)
    except ModelNotFound as error:
        raise Fault(f"--model {options.model}: {error}") from error


def _converted(options: argparse.Namespace) -> Path:
    gguf_file = _gguf(options)
    cache = options.cache or default_cache()
    require_writable(cache)
    try:
        return prepare(gguf_file, cache)
    except OSError as error:
        raise Fault(f"--cache {cache}: {error}; it needs about 600 MB") from error
    except (BadWeights, ValueError) as error:
        raise Fault(f"--model {options.model}: {error}; give a Llama GGUF") from error


def _script(options: argparse.Namespace) -> Script | None:
    if options.script is None:
        return None
    try:
        return load_script(options.script)
    except OSError as error:
        raise Fault(f"--script {options.script}: {error.strerror}; name a JSONL file") from error
    except BadScript as error:
        raise Fault(f"--script {options.script}: {error}") from error
