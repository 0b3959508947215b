"""Where records go: the routing table, read from `routes.toml` and from a user's `[[route]]` rows.

    python -m rollstream.shared.routes        # the README's diagram

A step never names a topic; this table is the only place that does. `validate` holds that every
topic has one kind of record and one writer, that each stage's input fits, and that there is no
cycle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import resources
from importlib.metadata import entry_points
from typing import Any, Literal, NamedTuple

import msgspec

from rollstream.shared.config import ConfigError, read_file, unknown_key

SERVICE_GROUP = "rollstream.services"
"""Entry points of this group are the services that exist, this project's own and others'."""


class Route(msgspec.Struct, frozen=True):
    """One stage instance in one pipeline: `service` or `service:name`."""

    pipeline: str
    instance: str
    input: str | None = None
    output: str | None = None
    when: Literal["always", "teacher"] = "always"

    @property
    def service(self) -> str:
        return self.instance.partition(":")[0]

    @property
    def leaf(self) -> str | None:
        """The name under which this instance counts ends, where it is a sink."""
        if self.input is None or self.output is not None:
            return None
        return self.instance.partition(":")[2] or self.instance


class Signature(NamedTuple):
    """Which records a service reads and which it writes; None at the ends of the line."""

    consumes: frozenset[str] | None
    produces: str | None


SIGNATURES: dict[str, Signature] = {
    "prompt-producer": Signature(None, "Prompt"),
    "generator": Signature(frozenset({"Prompt"}), "Rollout"),
    "scorer": Signature(frozenset({"Rollout", "Scored"}), "Scored"),
    "teacher-distiller": Signature(frozenset({"Scored", "Distilled"}), "Distilled"),
    "sink": Signature(frozenset({"Scored", "Distilled"}), None),
}
"""This project's services; another package's service declares its own (`signatures`)."""


class _RouteFile(msgspec.Struct, forbid_unknown_fields=True):
    route: list[Route] = []


def builtin() -> list[Route]:
    """The rows of `routes.toml`."""
    text = resources.files("rollstream.shared").joinpath("routes.toml").read_text()
    return msgspec.toml.decode(text, type=_RouteFile).route


def load(rows: Iterable[Mapping[str, Any]] = ()) -> list[Route]:
    """The built-in table and a user's own rows, validated together.

    A row of an instance that the pipeline has already takes its place, e.g. to have a sink read
    another output. Raises ConfigError naming the row and the fix.
    """
    own: list[Route] = []
    known = list(Route.__struct_fields__)
    for row in rows:
        for key in row:
            if key not in known:
                raise unknown_key(f"route.{key}", [f"route.{name}" for name in known])
        try:
            own.append(msgspec.convert(row, Route))
        except msgspec.ValidationError as error:
            raise ConfigError("[[route]]", str(dict(row)), str(error)) from error
    table = builtin()
    places = {(route.pipeline, route.instance): at for at, route in enumerate(table)}
    for route in own:
        at = places.pop((route.pipeline, route.instance), None)
        if at is None:
            table.append(route)
        else:
            table[at] = route
    validate(table, signatures({route.service for route in table}))
    return table


def signatures(used: Iterable[str] = ()) -> dict[str, Signature]:
    """What this project's services read and write, and those other packages' services of `used`.

    A foreign service is an entry point; only the ones that are used get imported.
    """
    found = dict(SIGNATURES)
    for point in entry_points(group=SERVICE_GROUP):
        if point.name in used and point.name not in found:
            service = point.load()
            found[point.name] = Signature(service.consumes, service.produces)
    return found


def validate(table: list[Route], known: Mapping[str, Signature]) -> None:
    """Refuse a table in which a record could get lost or meet a stage that can't read it.

    Raises ConfigError.
    """
    for pipeline in {route.pipeline for route in table}:
        rows = [route for route in table if route.pipeline == pipeline]
        written: dict[str, str] = {}
        seen: set[str] = set()
        for route in rows:
            field = f"route {pipeline}/{route.instance}"
            if route.service not in known:
                raise ConfigError(field, route.service, f"use a service of: {', '.join(known)}")
            if route.instance in seen:
                raise ConfigError(field, route.instance, "give this instance its own name, "
                                  f"such as {route.service}:second")
            seen.add(route.instance)
            produces = known[route.service].produces
            if (produces is None) != (route.output is None):
                need = "leave output away" if produces is None else "name an output"
                raise ConfigError(f"{field}.output", str(route.output), need)
            if route.output is not None and produces is not None:
                if route.output in RESERVED_OUTPUTS:
                    raise ConfigError(f"{field}.output", route.output, "this name is taken")
                if route.output in written:
                    raise ConfigError(f"{field}.output", route.output,
                                      "one instance writes a topic: choose another name")
                written[route.output] = produces
        for route in rows:
            _check_input(f"route {pipeline}/{route.instance}", route, known, written)
        _check_acyclic(pipeline, rows)


RESERVED_OUTPUTS = frozenset({"ledger", "dlq", "control", "runs"})


def _check_input(
    field: str, route: Route, known: Mapping[str, Signature], written: dict[str, str]
) -> None:
    consumes = known[route.service].consumes
    if (consumes is None) != (route.input is None):
        need = "leave input away" if consumes is None else "name the output that it reads"
        raise ConfigError(f"{field}.input", str(route.input), need)
    if consumes is None or route.input is None:
        return
    if route.input not in written:
        raise ConfigError(f"{field}.input", route.input, f"use one of: {', '.join(written)}")
    if written[route.input] not in consumes:
        raise ConfigError(
            f"{field}.input", route.input,
            f"it holds {written[route.input]}, {route.service} reads {' or '.join(consumes)}",
        )


def _check_acyclic(pipeline: str, rows: list[Route]) -> None:
    writer = {route.output: route for route in rows if route.output}
    for route in rows:
        steps, current = 0, route
        while current.input is not None:
            current, steps = writer[current.input], steps + 1
            if steps > len(rows):
                raise ConfigError(f"route {pipeline}/{route.instance}", str(route.input),
                                  "the pipeline runs in a circle here")


def pipelines(table: Iterable[Route]) -> list[str]:
    """The names of the pipelines, in the table's order."""
    return list(dict.fromkeys(route.pipeline for route in table))


def stages(table: Iterable[Route], pipeline: str, *, teacher: bool) -> list[Route]:
    """The stages of one run: a stage left out hands its input on to its readers.

    Raises ConfigError for a pipeline that does not exist.
    """
    rows = [route for route in table if route.pipeline == pipeline]
    if not rows:
        names = pipelines(table)
        raise ConfigError("pipeline", pipeline, f"use one of: {', '.join(names)}")
    left_out = {r.output: r.input for r in rows if r.when == "teacher" and not teacher}

    def source(name: str | None) -> str | None:
        while name in left_out:
            name = left_out[name]
        return name

    return [
        msgspec.structs.replace(route, input=source(route.input))
        for route in rows
        if route.output is None or route.output not in left_out
    ]


def leaves(run_stages: Iterable[Route]) -> list[str]:
    """The names of the sinks that count ends."""
    return [route.leaf for route in run_stages if route.leaf]


def way_to(run_stages: Iterable[Route], route: Route) -> list[Route]:
    """The stages from the producer to this one, both included."""
    rows, way = list(run_stages), [route]
    while way[0].input is not None:
        way.insert(0, next(row for row in rows if row.output == way[0].input))
    return way


def leaves_after(run_stages: Iterable[Route], instance: str) -> list[str]:
    """The leaves that a stage's output leads to, its own name where it is one."""
    rows = list(run_stages)
    reached = {row.instance for row in rows if row.instance == instance}
    while True:
        outputs = {row.output for row in rows if row.instance in reached and row.output}
        further = reached | {row.instance for row in rows if row.input in outputs}
        if further == reached:
            return [row.leaf for row in rows if row.instance in reached and row.leaf]
        reached = further


def diagram(table: list[Route]) -> str:
    """The table as text lines for the README: one line a path to a sink."""
    lines = []
    for pipeline in pipelines(table):
        rows = [route for route in table if route.pipeline == pipeline]
        writer = {route.output: route for route in rows if route.output}
        for sink in (route for route in rows if route.leaf):
            parts, current = [f"{sink.service}: {sink.leaf}"], sink
            while current.input is not None:
                upstream = writer[current.input]
                hop = f"{upstream.instance} -> {current.input}"
                parts.append(f"[{hop}]" if upstream.when == "teacher" else hop)
                current = upstream
            lines.append(f"{pipeline:<5} " + " -> ".join(reversed(parts)))
    return "\n".join(lines)


def main() -> None:
    print(diagram(load(read_file(None).get("route", ()))))


if __name__ == "__main__":
    main()
