"""A trainer's side of the trainer API, with acknowledged batches.

    client = TrainerClient("http://127.0.0.1:8000")
    client.wait_until_up()
    client.register(batch_size=32)
    for batch in client.batches():
        train(batch)                 # asking for the next one acknowledges this one

A batch that was not acknowledged is offered again after a restart of either side, with the same id
and `redelivered` set.
"""

from __future__ import annotations

import gzip
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

MASKED_TOKEN = -100


class TrainerError(RuntimeError):
    """The trainer API refused, or could not be reached in time."""


@dataclass(frozen=True)
class Trajectory:
    """One token sequence; all arrays have its length T."""

    tokens: np.ndarray
    """int32 [T]: prompt and completion."""
    mask: np.ndarray
    """bool [T]: True where the policy sampled the token."""
    logprobs: np.ndarray | None
    """float32 [T]: the sampler's logprob where mask is True, 0 elsewhere."""
    score: float
    advantages: np.ndarray | None = None
    """float32 [T], only of runs with `send_advantages`."""
    distill_token_ids: np.ndarray | None = None
    """int32 [T, k]: the teacher's k best for each token, by rank; -1 at position 0."""
    distill_logprobs: np.ndarray | None = None
    """float32 [T, k]; 0 at position 0."""


@dataclass(frozen=True)
class Group:
    """The trajectories of one prompt."""

    trajectories: list[Trajectory]
    fields: dict[str, Any]
    """The group as it came, with all fields of Atropos' schema."""


@dataclass(frozen=True)
class Batch:
    """What one training step takes."""

    id: int
    version: int
    """The policy version when it was handed out."""
    redelivered: bool
    groups: list[Group]

    @property
    def trajectories(self) -> list[Trajectory]:
        return [t for group in self.groups for t in group.trajectories]


class TrainerClient:
    """Talks to one run's trainer API; not for use by several threads at once."""

    def __init__(self, url: str, *, timeout_s: float = 60.0) -> None:
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._unacknowledged = -1
        self.done = False
        """The run has no further batch."""

    def wait_until_up(self, timeout_s: float = 60.0) -> None:
        """Wait for the API to answer. Raises TrainerError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._call("GET", "/")
                return
            except TrainerError as error:
                if time.monotonic() > deadline:
                    raise TrainerError(
                        f"no trainer API at {self._url} within {timeout_s:g} s: {error}"
                    ) from error
                time.sleep(0.2)

    def register(
        self, *, batch_size: int, starting_step: int = 0, num_steps: int = -1,
        max_token_len: int = -1, checkpoint_dir: str = "", save_checkpoint_interval: int = -1,
        wandb_project: str = "", wandb_group: str = "",
    ) -> None:
        """Say that a trainer is there. Raises TrainerError where the run does not fit."""
        self._call("POST", "/register", {
            "batch_size": batch_size, "starting_step": starting_step, "num_steps": num_steps,
            "max_token_len": max_token_len, "checkpoint_dir": checkpoint_dir,
            "save_checkpoint_interval": save_checkpoint_interval,
            "wandb_project": wandb_project, "wandb_group": wandb_group,
        })

    def announce(self, version: int, weights: str = "") -> None:
        """Say which policy version the weights are now; from then on none is implied.

        `weights`: the folder that endpoints load, in runs whose `updates.method` is reload or lora.
        """
        self._call("POST", "/policy-version", {"version": version, "weights": weights})

    def label(self, version: int) -> str:
        """What an endpoint is to be told of these weights before they are announced.

        For runs whose `updates.method` is trainer: vLLM's `/update_weight_version`.
        """
        return self._call("GET", f"/policy-version?next={version}")["next_label"]

    def needed_weights(self) -> list[str]:
        """Announced folders that an endpoint may still load or use: others may be removed."""
        return self._call("GET", "/policy-version")["needed"]

    def live(self) -> dict[str, str]:
        """By endpoint URL, the label of the weights that it has confirmed."""
        return self._call("GET", "/policy-version")["live"]

    def next_batch(self) -> Batch | None:
        """The next batch; the one before is acknowledged. None where none is ready.

        Raises TrainerError.
        """
        got = self._call("GET", f"/batch?ack={self._unacknowledged}")
        if got.get("status") == "error":
            raise TrainerError(got["message"])
        self.done = bool(got.get("done"))
        if got["batch"] is None:
            return None
        self._unacknowledged = got["batch_id"]
        return Batch(
            id=got["batch_id"], version=got["version"], redelivered=got["redelivered"],
            groups=[Group(_trajectories(fields), fields) for fields in got["batch"]],
        )

    def batches(self, *, wait_s: float = 600.0, poll_s: float = 0.2) -> Iterator[Batch]:
        """Batches until the run has no more.

        Asking for the next one acknowledges the one before; leave the loop early and `acknowledge`
        says that the last one was used. Raises TrainerError where none comes for `wait_s`.
        """
        deadline = time.monotonic() + wait_s
        while True:
            batch = self.next_batch()
            if batch is not None:
                yield batch
                deadline = time.monotonic() + wait_s
            elif self.done:
                return
            elif time.monotonic() > deadline:
                raise TrainerError(f"no batch from {self._url} for {wait_s:g} s")
            else:
                time.sleep(poll_s)

    def acknowledge(self) -> None:
        """The last batch was used, and no further one is wanted now. Raises TrainerError."""
        if self._unacknowledged >= 0:
            self._call("POST", "/ack", {"batch_id": self._unacknowledged})

    def _call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        request = urllib.request.Request(
            self._url + path, method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Accept-Encoding": "gzip"},
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                data = response.read()
                if response.headers.get("Content-Encoding") == "gzip":
                    data = gzip.decompress(data)
                return json.loads(data)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            raise TrainerError(f"{method} {path}: {error.code} {text}") from error
        except (OSError, ValueError) as error:
            raise TrainerError(f"{method} {self._url}{path}: {error}") from error


def _trajectories(fields: dict[str, Any]) -> list[Trajectory]:
    found = []
    for at, tokens in enumerate(fields["tokens"]):
        mask = np.asarray(fields["masks"][at], np.int32) != MASKED_TOKEN
        logprobs = _row(fields, "inference_logprobs", at)
        found.append(Trajectory(
            tokens=np.asarray(tokens, np.int32), mask=mask,
            logprobs=None if logprobs is None else np.where(mask, logprobs, np.float32(0)),
            score=fields["scores"][at], advantages=_row(fields, "advantages", at),
            distill_token_ids=_ranks(fields, "distill_token_ids", at, np.int32, -1),
            distill_logprobs=_ranks(fields, "distill_logprobs", at, np.float32, 0),
        ))
    return found


def _row(fields: dict[str, Any], name: str, at: int) -> np.ndarray | None:
    values = fields[name]
    return None if values is None else np.asarray(values[at], np.float32)


def _ranks(
    fields: dict[str, Any], name: str, at: int, dtype: type, missing: float
) -> np.ndarray | None:
    values = fields[name]
    if values is None:
        return None
    rows = values[at]
    k = max(map(len, rows), default=0)
    return np.asarray([row or [missing] * k for row in rows], dtype).reshape(len(rows), k)
