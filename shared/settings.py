"""A service process's own settings: how to reach things, and limits. Runs bring the rest."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rollstream.shared.brokers.connection import Security
from rollstream.shared.config import ConfigError, resolve
from rollstream.shared.inference.endpoints import Endpoint, normalise

DEFAULT_ENDPOINT = "http://localhost:9001/v1"
"""Where the endpoint `default` is unless settings say otherwise."""

BROKERS_VARIABLE = "KAFKA_BOOTSTRAP_SERVERS"


class ServiceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What every service process is told; each field is a key, a variable and a flag."""

    brokers: Annotated[
        str, Meta(description=f"host:port,... of Kafka; {BROKERS_VARIABLE} works too")
    ] = ""
    prefix: Annotated[str, Meta(description="all topics begin with it")] = "rollstream"
    run: Annotated[str, Meta(description="serve only this run")] = ""
    instance: Annotated[
        str, Meta(description="serve only this stage instance, e.g. scorer:strict")
    ] = ""
    endpoints: Annotated[
        dict[str, Endpoint],
        Meta(description='inference servers by name, JSON: {"default": {"url": "..."}}'),
    ] = {}
    max_in_flight: Annotated[
        int, Meta(ge=1, description="generator: samples at once; scorer: groups at once")
    ] = 64
    workers: Annotated[int, Meta(ge=1, description="scorer: processes")] = 1
    teacher_tokens_in_flight: Annotated[
        int, Meta(ge=1, description="teacher-distiller: prompt tokens at once")
    ] = 65_536
    startup_wait_s: Annotated[
        float, Meta(gt=0, description="how long to wait for the broker and for servers")
    ] = 60.0
    broker_lost_s: Annotated[
        float, Meta(gt=0, description="exit when the broker can't be reached for so long")
    ] = 60.0
    drain_s: Annotated[float, Meta(gt=0, description="grace at SIGTERM")] = 60.0
    session_timeout_ms: Annotated[
        int, Meta(ge=1000, description="a member silent for so long has lost its partitions")
    ] = 10_000
    health_host: str = "127.0.0.1"
    health_port: Annotated[
        int, Meta(ge=0, le=65535, description="/livez /readyz /metrics; 0 = any free port")
    ] = 0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    security: Security = Security()

    def endpoint(self, name: str) -> Endpoint:
        """The endpoint of that name; a URL is an endpoint of its own.

        Raises ConfigError where there is none.
        """
        if name in self.endpoints:
            return self.endpoints[name]
        if "://" in name:
            return Endpoint(name=name, url=name)
        if name == "default":
            return Endpoint(name=name, url=DEFAULT_ENDPOINT)
        known = ", ".join(sorted(self.endpoints)) or "none"
        raise ConfigError("endpoint", name, f"add [endpoints.{name}] with a url (known: {known})")


def load_settings(table: dict[str, Any], flags: dict[str, Any]) -> ServiceSettings:
    """The settings from a file's table, the environment and flags.

    Raises ConfigError.
    """
    table = dict(table)
    endpoints = {
        name: {"name": name, **value} if isinstance(value, dict) else {"name": name, "url": value}
        for name, value in dict(table.pop("endpoints", {})).items()
    }
    if endpoints:
        table["endpoints"] = endpoints
    settings = resolve(ServiceSettings, table=table, flags=flags)
    if not settings.brokers:
        settings = msgspec.structs.replace(settings, brokers=os.environ.get(BROKERS_VARIABLE, ""))
    for name, endpoint in settings.endpoints.items():
        endpoint.name = endpoint.name or name
        for url in endpoint.url.split(",") if isinstance(endpoint.url, str) else endpoint.url:
            try:
                normalise(url)
            except ValueError as error:
                raise ConfigError(f"endpoints.{name}.url", "?", str(error)) from error
    return settings
