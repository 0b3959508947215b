"""Small records and runs for tests."""

from __future__ import annotations

from typing import Any

from rollstream.shared.routes import builtin, stages
from rollstream.shared.runs import EnvironmentSource, RunConfig


def run(pipeline: str = "rl", **fields: Any) -> RunConfig:
    """A run of two samples a group."""
    defaults: dict[str, Any] = {
        "run": "r", "partitions": 4, "log_id": "l", "model": "m", "group_size": 2,
        "stages": stages(builtin(), pipeline, teacher=False),
        "environments": [EnvironmentSource(id="e")],
    }
    return RunConfig(pipeline=pipeline, **{**defaults, **fields})
