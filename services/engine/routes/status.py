"""What the server says of itself."""

from __future__ import annotations

from aiohttp import web

from rollstream import __version__
from rollstream.services.engine.answers import json_answer
from rollstream.services.engine.errors import ApiError
from rollstream.services.engine.serving import SERVING

routes = web.RouteTableDef()


@routes.get("/health")
@routes.get("/ping")
@routes.post("/ping")
async def health(request: web.Request) -> web.Response:
    """200 while the computing thread lives."""
    if not request.app[SERVING].worker.alive:
        raise ApiError("the engine's thread has died", status=503, kind="ServiceUnavailableError")
    return web.Response()


@routes.get("/version")
async def version(request: web.Request) -> web.Response:
    """The engine's version, and which logprobs it reports."""
    return json_answer(
        {
            "version": f"rollstream-engine-{__version__}",
            "logprobs_mode": "processed_logprobs",
            "greedy_logprobs": "temperature 1, nothing cut",
        }
    )


@routes.get("/v1/models")
async def models(request: web.Request) -> web.Response:
    """The one model."""
    serving = request.app[SERVING]
    card = {
        "id": serving.model, "object": "model", "created": serving.started_s,
        "owned_by": "rollstream", "root": serving.model, "parent": None,
        "max_model_len": serving.max_model_len,
    }
    return json_answer({"object": "list", "data": [card]})


@routes.get("/metrics")
async def metrics(request: web.Request) -> web.Response:
    """Prometheus text under vLLM's names."""
    serving = request.app[SERVING]
    scheduler, cache = serving.worker.scheduler, serving.prefix_cache
    rows: list[tuple[str, str, dict[str, str], int]] = [
        ("gauge", "num_requests_running", {}, len(scheduler.running)),
        ("gauge", "num_requests_waiting", {}, len(scheduler.waiting)),
        ("counter", "prompt_tokens_total", {}, scheduler.prompt_tokens),
        ("counter", "generation_tokens_total", {}, scheduler.generation_tokens),
        ("counter", "prefix_cache_queries_total", {}, cache.queried_tokens if cache else 0),
        ("counter", "prefix_cache_hits_total", {}, cache.hit_tokens if cache else 0),
    ]
    rows += [
        ("counter", "request_success_total", {"finished_reason": reason}, count)
        for reason, count in scheduler.finished.copy().items()
    ]
    lines: dict[str, None] = {}
    for kind, name, labels, value in rows:
        shown = ",".join(
            f'{label}="{text}"' for label, text in ({"model_name": serving.model} | labels).items()
        )
        lines[f"# TYPE vllm:{name} {kind}"] = None
        lines[f"vllm:{name}{{{shown}}} {value}"] = None
    return web.Response(text="\n".join(lines) + "\n")
