"""What stages and roles tell each other on a run's control topic."""

from __future__ import annotations

from typing import Any

import msgspec


class Answer(msgspec.Struct, tag="answer", kw_only=True):
    """A stage accepts a proposed run, or refuses it with a reason."""

    v: int = 1
    instance: str
    service_id: str
    proposal: str
    accepted: bool
    reason: str = ""
    facts: dict[str, Any] = {}
    """From the producer: rows and fingerprint per environment; from others what they found out."""


class PolicyVersion(msgspec.Struct, tag="policy_version", kw_only=True):
    """The trainer moved on to this version."""

    v: int = 1
    version: int
    epoch: int = 0
    implied: bool = False
    """Counted by the sink, a batch a version: the trainer says none."""
    weights: str = ""
    """Where they lie, for endpoints that load them from files."""


class PolicyLive(msgspec.Struct, tag="policy_live", kw_only=True):
    """An endpoint has confirmed that it has these weights (`policy.label_of`)."""

    v: int = 1
    url: str
    label: str


class Offered(msgspec.Struct, tag="offered", kw_only=True):
    """This batch of groups was about to be handed to the trainer."""

    v: int = 1
    batch_id: int
    groups: list[int]
    version: int = 0


class Acked(msgspec.Struct, tag="acked", kw_only=True):
    """The trainer has the batch."""

    v: int = 1
    batch_id: int


class Finished(msgspec.Struct, tag="finished", kw_only=True):
    """A leaf has written everything that it will ever write for this run."""

    v: int = 1
    leaf: str
    ended: int = -1
    """How many groups had ended there by then: a run may end again after a redrive."""
