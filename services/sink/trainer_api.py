"""The trainer's HTTP API: Atropos' own, so that a trainer written for it runs unchanged.

Such a trainer asks `GET /batch` until it gets null, trains on what it got, and asks again. So each
round is one batch and then null, and the first request after that null acknowledges the round. A
trainer that sends `GET /batch?ack=<batch_id>` says itself what it has (`ack=-1` the first time).
"""

from __future__ import annotations

import asyncio
import gzip
import secrets
from pathlib import Path
from typing import Any

import msgspec
import structlog
from aiohttp import web

from rollstream.services.sink.dataset import env_index
from rollstream.services.sink.trainer import Batch, TrainerLeaf
from rollstream.services.sink.trajectories import scored_data_group
from rollstream.shared.bus import Lost
from rollstream.shared.durable import replacing
from rollstream.shared.records import Group

JSON_TYPE = "application/json"
COMPRESS_ABOVE_BYTES = 1000
WRITE_TIMEOUT_S = 120.0
SHUTDOWN_S = 2.0
EMPTY_EXAMPLE: dict[str, Any] = {"tokens": [], "masks": [], "scores": [], "advantages": [],
                                 "ref_logprobs": [], "generation_params": {},
                                 "inference_logprobs": [], "messages": []}

log = structlog.get_logger("rollstream.sink")


class Registration(msgspec.Struct, frozen=True):
    """The body of POST /register; every field must be there."""

    wandb_group: str
    wandb_project: str
    batch_size: int
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int


class EnvRegistration(msgspec.Struct, frozen=True):
    """The body of POST /register-env: an Atropos environment that wants to take part."""

    max_token_length: int
    desired_name: str
    weight: float
    group_size: int
    min_batch_allocation: float | None = None


class TrainerApi:
    """The routes over one TrainerLeaf."""

    def __init__(self, leaf: TrainerLeaf) -> None:
        self._leaf = leaf
        out = leaf.run.sink.out
        self._registration_file = Path(out) / "registration.json" if out else None
        self._registration = self._remembered()
        self._null_given = False
        self._asked = False
        self._environments: list[str] = []
        self.told_done = asyncio.Event()
        """Set once a trainer was told that there is no further batch."""

    def app(self) -> web.Application:
        app = web.Application(middlewares=[_lost_is_unavailable(self._leaf)])
        app.add_routes([
            web.get("/", self._root),
            web.post("/register", self._register),
            web.get("/batch", self._batch),
            web.post("/ack", self._acknowledge),
            web.get("/info", self._info),
            web.get("/wandb_info", self._wandb_info),
            web.get("/status", self._status),
            web.post("/policy-version", self._policy_version),
            web.get("/policy-version", self._policy),
            web.post("/register-env", self._register_env),
            web.get("/status-env", self._status_env),
            web.post("/status-env", self._status_env),
            web.post("/disconnect-env", self._disconnect_env),
            web.get("/latest_example", self._latest_example),
            web.post("/scored_data", _gone),
            web.post("/scored_data_list", _gone),
            web.get("/reset_data", _gone),
        ])
        return app

    @property
    def _registered(self) -> bool:
        """Also where it registered with an earlier owner of the role: the log says so."""
        return self._leaf.book.registered

    # -- registering ---------------------------------------------------------------------------

    async def _root(self, _: web.Request) -> web.Response:
        return _json({"message": "AtroposLib API", "run": self._leaf.run.run})

    async def _register(self, request: web.Request) -> web.Response:
        registration = await _body(request, Registration)
        expected = self._leaf.run.batch_size
        if registration.batch_size not in (-1, expected):
            raise _invalid([("batch_size", f"{registration.batch_size} samples, but the run hands "
                             f"out {expected}: register with {expected} or start the run with "
                             f"batch_size {registration.batch_size}")])
        # waits: whoever holds it waits for writes that have deadlines
        async with self._leaf.lock:
            await self._leaf.register(registration.starting_step)
        self._registration = registration
        if self._registration_file is not None:
            await asyncio.to_thread(_write, self._registration_file, registration)
        return _json({"uuid": secrets.randbits(53)})

    def _remembered(self) -> Registration | None:
        path = self._registration_file
        if path is None or not path.exists():
            return None
        try:
            return msgspec.json.decode(path.read_bytes(), type=Registration)
        except msgspec.MsgspecError:
            log.warning("could not read the trainer's registration", path=str(path))
            return None

    async def _policy_version(self, request: web.Request) -> web.Response:
        told = await _body(request, _Version)
        if self._leaf.run.updates.method in ("reload", "lora") and not told.weights:
            raise _invalid([("weights", "name the folder that endpoints load: this run's "
                             f"updates.method is {self._leaf.run.updates.method}")])
        # waits: whoever holds it waits for writes that have deadlines
        async with self._leaf.lock:
            await self._leaf.announce(told.version, told.weights)
        return _json({"version": told.version, "label": self._leaf.policy.label})

    async def _policy(self, request: web.Request) -> web.Response:
        """What is announced, where it is live, and which weights must be kept.

        `?next=12`: with the label that version 12 gets if it is announced next.
        """
        policy = self._leaf.policy
        try:
            following = int(request.query.get("next", policy.version + 1))
        except ValueError as error:
            raise _invalid([("next", "give a version, e.g. 12")]) from error
        return _json({
            "version": self._leaf.book.version, "epoch": policy.epoch, "label": policy.label,
            "next_label": policy.next_label(following), "live": policy.live,
            "needed": policy.needed(),
        })

    # -- batches -------------------------------------------------------------------------------

    async def _batch(self, request: web.Request) -> web.StreamResponse:
        if not self._registered:
            return _json({"status": "error", "message": "Trainer not registered", "batch": []})
        self._asked = True
        ack = _ack(request)
        # waits: whoever holds it waits for writes that have deadlines
        async with self._leaf.lock:
            batch = await self._to_hand_out(ack)
            if batch is None:
                done = self._leaf.finished
                if done:
                    self.told_done.set()
                return _json({"batch": None, **({"done": True} if done else {})})
            body = await asyncio.to_thread(self._payload, batch)
            response = await _written(request, body)
            self._leaf.handed_out = batch.id
            self._null_given = False
            return response

    async def _to_hand_out(self, ack: int | None) -> Batch | None:
        leaf, batch = self._leaf, self._leaf.open_batch
        if ack is not None:
            await self._acknowledge_named(ack)
        elif batch is not None and leaf.handed_out == batch.id:
            if leaf.offered_all or self._null_given:
                await leaf.acknowledge()  # the last round: nobody will ask after its null
            if not self._null_given:
                self._null_given = True
                return None
        if leaf.open_batch is not None:
            again = leaf.open_batch.redelivered or leaf.handed_out == leaf.open_batch.id
            return leaf.open_batch._replace(redelivered=again)
        return await leaf.next_batch()

    async def _acknowledge(self, request: web.Request) -> web.Response:
        """For a trainer that stops: acknowledge without asking for another batch."""
        given = await _body(request, _Ack)
        # waits: whoever holds it waits for writes that have deadlines
        async with self._leaf.lock:
            await self._acknowledge_named(given.batch_id)
        return _json({"batch_id": given.batch_id})

    async def _acknowledge_named(self, id: int) -> None:
        leaf = self._leaf
        if leaf.open_batch is not None and leaf.open_batch.id == id:
            await leaf.acknowledge()
        elif id >= 0 and id not in leaf.book.acked:
            raise web.HTTPConflict(
                text=_text({"error": f"batch {id} was not handed out"}), content_type=JSON_TYPE
            )

    def _payload(self, batch: Batch) -> bytes:
        return msgspec.json.encode({
            "batch": [self._scored_data(group) for group in batch.groups],
            "batch_id": batch.id, "redelivered": batch.redelivered, "version": batch.version,
        })

    def _scored_data(self, group: Group) -> dict[str, Any]:
        run = self._leaf.run
        return scored_data_group(
            group, env_id=env_index(run, group), send_advantages=run.send_advantages,
            include_messages=run.include_messages,
        )

    async def _latest_example(self, _: web.Request) -> web.Response:
        group = self._leaf.latest
        return _json(EMPTY_EXAMPLE if group is None else self._scored_data(group))

    # -- what there is to know -----------------------------------------------------------------

    async def _info(self, _: web.Request) -> web.Response:
        if not self._registered:
            return _json({"batch_size": -1, "max_token_len": -1})
        given = self._registration
        return _json({"batch_size": self._leaf.run.batch_size,
                      "max_token_len": given.max_token_len if given else -1})

    async def _wandb_info(self, _: web.Request) -> web.Response:
        given = self._registration
        return _json({"group": given.wandb_group if given else None,
                      "project": given.wandb_project if given else None})

    async def _status(self, _: web.Request) -> web.Response:
        return _json({"current_step": self._leaf.book.version, "queue_size": len(self._leaf.pool)})

    # -- environments of Atropos: they may look, but post nothing ------------------------------

    async def _register_env(self, request: web.Request) -> web.Response:
        env = await _body(request, EnvRegistration)
        if not (self._registered and self._asked):
            return _json({"status": "wait for trainer to start"})
        number = self._environments.count(env.desired_name)
        self._environments.append(env.desired_name)
        given = self._registration
        return _json({
            "status": "success", "env_id": len(self._environments) - 1,
            "wandb_name": f"{env.desired_name}_{number}",
            "checkpoint_dir": given.checkpoint_dir if given else "",
            "starting_step": self._leaf.book.version,
            "checkpoint_interval": given.save_checkpoint_interval if given else -1,
            "num_steps": given.num_steps if given else self._leaf.run.total_steps or -1,
        })

    async def _status_env(self, _: web.Request) -> web.Response:
        return _json({
            "current_step": self._leaf.book.version, "queue_size": len(self._leaf.pool),
            "unallocated_fraction": 1.0, "self_queue_size": 0,
            "max_group_size": self._leaf.run.group_size, "env_weight": 1.0,
        })

    async def _disconnect_env(self, _: web.Request) -> web.Response:
        return _json({"status": "success"})


class _Version(msgspec.Struct, frozen=True):
    version: int
    weights: str = ""


class _Ack(msgspec.Struct, frozen=True):
    batch_id: int


async def _gone(_: web.Request) -> web.Response:
    text = ("Groups come from the run's topics here: start a run with `rollstream rl`, nothing is "
            "posted to this API.")
    return _json({"status": "error", "error": text}, status=410)


def _lost_is_unavailable(leaf: TrainerLeaf) -> Any:
    """A request that finds the role lost answers 503, and ends the attempt."""

    @web.middleware
    async def middleware(request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            return await handler(request)
        except Lost as error:
            leaf.fail(error)
            return _json({"status": "error", "error": str(error)}, status=503)

    return middleware


def _ack(request: web.Request) -> int | None:
    text = request.query.get("ack")
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise _invalid([("ack", f"{text!r} is no batch id; -1 means none yet")]) from None


async def _body(request: web.Request, kind: type[Any]) -> Any:
    """The JSON body; 422 with FastAPI's shape, naming every field that is missing or wrong."""
    try:
        given = msgspec.json.decode(await request.read())
    except msgspec.DecodeError as error:
        raise _invalid([("", f"no valid JSON ({error})")]) from error
    if not isinstance(given, dict):
        raise _invalid([("", "give a JSON object")])
    problems, values = [], {}
    for field in msgspec.structs.fields(kind):
        if field.name not in given:
            if field.required:
                problems.append((field.name, "field required"))
            continue
        try:
            values[field.name] = msgspec.convert(given[field.name], field.type, strict=False)
        except msgspec.ValidationError as error:
            problems.append((field.name, str(error)))
    if problems:
        raise _invalid(problems)
    return kind(**values)


def _invalid(problems: list[tuple[str, str]]) -> web.HTTPUnprocessableEntity:
    detail = [{"loc": ["body", *([field] if field else [])], "msg": message, "type": "value_error"}
              for field, message in problems]
    return web.HTTPUnprocessableEntity(text=_text({"detail": detail}), content_type=JSON_TYPE)


def _text(content: Any) -> str:
    return msgspec.json.encode(content).decode()


def _json(content: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(content), status=status, content_type=JSON_TYPE
    )


async def _written(request: web.Request, body: bytes) -> web.StreamResponse:
    """The body, sent whole. Raises where the connection is gone, so that the batch is not."""
    headers = {"Content-Type": JSON_TYPE}
    accepted = request.headers.get("Accept-Encoding", "")
    if "gzip" in accepted and len(body) >= COMPRESS_ABOVE_BYTES:
        body = await asyncio.to_thread(gzip.compress, body, 1)
        headers["Content-Encoding"] = "gzip"
    response = web.StreamResponse(headers=headers)
    response.content_length = len(body)
    async with asyncio.timeout(WRITE_TIMEOUT_S):
        await response.prepare(request)
        await response.write(body)
        await response.write_eof()
    return response


def _write(path: Path, registration: Registration) -> None:
    with replacing(path) as aside:
        aside.write_bytes(msgspec.json.encode(registration))
