"""What a trainer does to a server: pause, new weights, their version, resume; and abort."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
from aiohttp import web

from rollstream.services.engine.answers import json_answer
from rollstream.services.engine.bodies import read_body
from rollstream.services.engine.errors import ApiError
from rollstream.services.engine.serving import SERVING
from rollstream.services.engine.weights import BadWeights

routes = web.RouteTableDef()


class AbortBody(msgspec.Struct):
    """No ids: everything in flight."""

    request_ids: list[str] | None = None


class RpcBody(msgspec.Struct):
    method: str
    kwargs: dict[str, Any] = {}


class VersionBody(msgspec.Struct):
    new_version: str


class PauseQuery(msgspec.Struct):
    mode: Literal["keep", "wait", "abort"] = "abort"


@routes.post("/abort_requests")
async def abort_requests(request: web.Request) -> web.Response:
    """Ends requests by the id in their answer; they answer with what they have."""
    return json_answer({"status": "aborted", "aborted": await _abort(request)})


@routes.post("/inference/v1/abort_requests")
async def inference_abort_requests(request: web.Request) -> web.Response:
    """The same, with an empty answer."""
    await _abort(request)
    return web.Response()


async def _abort(request: web.Request) -> int:
    ids = (await read_body(request, AbortBody)).request_ids
    return await request.app[SERVING].worker.abort(None if ids is None else set(ids))


@routes.post("/pause")
async def pause(request: web.Request) -> web.Response:
    """Stops sampling; new requests wait until /resume."""
    try:
        query = msgspec.convert(dict(request.query), PauseQuery)
    except msgspec.ValidationError as error:
        raise ApiError(f"mode: {error}", param="mode") from error
    await request.app[SERVING].worker.pause(query.mode)
    return json_answer({"status": "paused"})


@routes.post("/resume")
async def resume(request: web.Request) -> web.Response:
    """Goes on."""
    await request.app[SERVING].worker.resume()
    return json_answer({"status": "resumed"})


@routes.get("/is_paused")
async def is_paused(request: web.Request) -> web.Response:
    """Whether sampling is stopped."""
    return json_answer({"is_paused": request.app[SERVING].worker.paused})


@routes.post("/collective_rpc")
async def collective_rpc(request: web.Request) -> web.Response:
    """`reload_weights` with `weights_path`: a folder with a checkpoint of the same model."""
    serving = request.app[SERVING]
    body = await read_body(request, RpcBody)
    if body.method != "reload_weights":
        raise ApiError(f"method={body.method!r}: only 'reload_weights' is known", param="method")
    path = body.kwargs.get("weights_path")
    if not isinstance(path, str):
        raise ApiError(f"kwargs.weights_path={path!r} is no text", param="kwargs.weights_path")
    if (reload := serving.reload) is not None:
        try:
            await serving.worker.call(lambda: reload(Path(path)))
        except (BadWeights, OSError, ValueError) as error:
            raise ApiError(f"kwargs.weights_path: {error}", param="kwargs.weights_path") from error
    return json_answer({"results": [None]})


@routes.post("/update_weight_version")
async def update_weight_version(request: web.Request) -> web.Response:
    """Names the weights that sample from now on."""
    worker = request.app[SERVING].worker
    version = (await read_body(request, VersionBody)).new_version
    await worker.call(lambda: setattr(worker.scheduler, "version", version))
    return json_answer({"success": True, "weight_version": version})


@routes.get("/weight_info")
async def weight_info(request: web.Request) -> web.Response:
    """The version of the weights."""
    return json_answer({"weight_version": request.app[SERVING].worker.scheduler.version})


@routes.post("/reset_prefix_cache")
async def reset_prefix_cache(request: web.Request) -> web.Response:
    """Forgets what was computed for prefixes."""
    serving = request.app[SERVING]
    if serving.prefix_cache is not None:
        await serving.worker.call(serving.prefix_cache.clear)
    return json_answer({"success": True})
