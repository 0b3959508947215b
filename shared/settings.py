"""A service process's own settings: how to reach things, and limits. Runs bring the rest."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rollstream.shared.brokers.connection import Security
from rollstream.shared.config import ConfigError, resolve, section, unknown_key
from rollstream.shared.inference.endpoints import Endpoint, normalise
from rollstream.shared.routes import SIGNATURES
from rollstream.shared.runs import check_run_id
from rollstream.shared.service import installed

DEFAULT_ENDPOINT = "http://localhost:9001/v1"
"""Where the endpoint `default` is unless settings say otherwise."""

BROKERS_VARIABLE = "KAFKA_BOOTSTRAP_SERVERS"
_OWN_BROKERS_VARIABLE = "ROLLSTREAM_BROKERS"


def with_brokers(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables, of which KAFKA_BOOTSTRAP_SERVERS stands for ROLLSTREAM_BROKERS, too."""
    found = dict(variables)
    if common := found.get(BROKERS_VARIABLE):
        found.setdefault(_OWN_BROKERS_VARIABLE, common)
    return found


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
    open_groups_bytes: Annotated[
        int,
        Meta(ge=0, description="scorer: incomplete groups in memory; more are left in the log"),
    ] = 512 * 1024 * 1024
    tokens_in_flight: Annotated[
        int, Meta(ge=0, description="generator: prompt and budget tokens at once; 0 = no limit")
    ] = 1_000_000
    teacher_tokens_in_flight: Annotated[
        int, Meta(ge=1, description="teacher-distiller: prompt tokens at once")
    ] = 65_536
    startup_wait_s: Annotated[
        float, Meta(gt=0, description="how long to wait for the broker and for servers")
    ] = 60.0
    broker_lost_s: Annotated[
        float, Meta(gt=0, description="exit when the broker can't be reached for so long")
    ] = 60.0
    broker_pid: Annotated[
        int, Meta(ge=0, description="the broker's process, where it is on this machine")
    ] = 0
    broker_memory_bytes: Annotated[
        int, Meta(ge=0, description="admit nothing above 80 % of this in the broker; 0 = no cap")
    ] = 0
    no_progress_s: Annotated[
        float,
        Meta(ge=0, description="warn after so long without progress, unhealthy at 2x, over at 3x; "
             "0 = from the run's deadlines"),
    ] = 0.0
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

    @property
    def answer_wait_s(self) -> float:
        """How long a server may keep us from answering a proposal: less than the command waits."""
        return 0.6 * self.startup_wait_s

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


def file_keys() -> set[str]:
    """What may stand at the top of the common file, but for sections of a foreign service."""
    return {*ServiceSettings.__struct_fields__, *SIGNATURES, *installed(), "route", "run"}


def check_file(table: Mapping[str, Any]) -> None:
    """Refuse what nobody reads at the top of the common file. Raises ConfigError."""
    rows = table.get("route", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError("route", rows, "write each row as a table [[route]]")
    own = {str(row.get("instance", "")).partition(":")[0] for row in rows}
    known = {*file_keys(), *own}
    for key in table:
        if key not in known:
            raise unknown_key(key, sorted(known))
        if key == "run" or key not in (*ServiceSettings.__struct_fields__, "route"):
            section(table, key)


def service_table(table: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The file's common settings, with the service's own section laid over them."""
    common = {k: v for k, v in table.items() if k in ServiceSettings.__struct_fields__}
    # `[run]` is a run's; a service's own setting `run` is told by flag or variable.
    common.pop("run", None)
    return {**common, **section(table, name)}


def load_settings(table: dict[str, Any], flags: dict[str, Any]) -> ServiceSettings:
    """The settings from a file's table, the environment and flags.

    Raises ConfigError.
    """
    table = dict(table)
    if "endpoints" in table:
        table["endpoints"] = {
            name: value if isinstance(value, dict) else {"url": value}
            for name, value in section(table, "endpoints").items()
        }
    settings = resolve(
        ServiceSettings, table=table, variables=with_brokers(os.environ), flags=flags
    )
    if settings.run:
        check_run_id(settings.run)
    for name, endpoint in settings.endpoints.items():
        endpoint.name = endpoint.name or name
        for url in endpoint.url.split(",") if isinstance(endpoint.url, str) else endpoint.url:
            try:
                normalise(url)
            except ValueError as error:
                raise ConfigError(f"endpoints.{name}.url", "?", str(error)) from error
    return settings
