"""Settings from one TOML file, environment variables and flags, typed by msgspec Structs.

A flag wins over a variable, a variable over the file. An unknown key is refused with the nearest
name that exists. Every field of a Struct is a key of the file, a variable and a flag at once:
`[sampling] max_tokens`, `ROLLSTREAM_SAMPLING_MAX_TOKENS`, `--sampling.max-tokens`.
"""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import msgspec

S = TypeVar("S", bound=msgspec.Struct)
VARIABLE_PREFIX = "ROLLSTREAM_"
LARGEST_FILE_BYTES = 1024 * 1024
LONGEST_SHOWN = 200
_FOREIGN_VARIABLE = re.compile(r".*_(UID|GID|SERVICE_HOST|SERVICE_PORT\w*|PORT|PORT_\d+_\w+)")
"""Not ours though they begin alike: docker-compose.yml's, and Kubernetes' for a Service."""
_SECRET = re.compile(r"api.?key|password|secret", re.IGNORECASE)


class ConfigError(ValueError):
    """Bad input, said in one line: the field, its value and the fix."""

    def __init__(self, field: str, value: object, fix: str) -> None:
        shown = value if isinstance(value, str) else repr(value)
        if len(shown) > LONGEST_SHOWN:
            shown = shown[:LONGEST_SHOWN] + "..."
        line = " ".join(f"{field} = {shown}: {fix}".split())
        # A byte that is no text, as a shell may pass it, can be printed nowhere.
        super().__init__(line.encode(errors="replace").decode())
        self.field = field
        self.fix = fix


class Setting(NamedTuple):
    """One leaf field of a settings Struct."""

    path: tuple[str, ...]
    type: Any
    default: Any
    help: str

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return VARIABLE_PREFIX + "_".join(self.path).upper()


def settings_of(struct: type[msgspec.Struct], path: tuple[str, ...] = ()) -> list[Setting]:
    """The leaf fields of a Struct and of the Structs inside it, in order."""
    found: list[Setting] = []
    hints = typing.get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        inner, help_text = _peel(hints[field.name])
        here = (*path, field.encode_name)
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            found += settings_of(inner, here)
        else:
            found.append(Setting(here, hints[field.name], _default(field), help_text))
    return found


def _peel(hint: Any) -> tuple[Any, str]:
    """The type without Annotated and without `| None`, and its description."""
    help_text = ""
    if typing.get_origin(hint) is typing.Annotated:
        hint, *extras = typing.get_args(hint)
        help_text = next(
            (e.description for e in extras if isinstance(e, msgspec.Meta) and e.description), ""
        )
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        options = [a for a in typing.get_args(hint) if a is not type(None)]
        if len(options) == 1:
            inner, inner_help = _peel(options[0])
            return inner, help_text or inner_help
    return hint, help_text


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default is not msgspec.NODEFAULT:
        return field.default
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return msgspec.NODEFAULT


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are a ConfigError, one line like every other."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        found = re.match(r"argument (.*?): (.*)", message, re.DOTALL)
        field, what = found.groups() if found else ("arguments", message)
        if wrong := re.match(r"invalid [^:]*: '(.*?)'(?: \((.*)\))?$", what, re.DOTALL):
            value, choices = wrong.groups()
            raise ConfigError(field, value, choices or f"see {self.prog} --help")
        raise ConfigError(field, "(not given)", f"{what}; see {self.prog} --help")


def add_flags(parser: argparse.ArgumentParser, struct: type[msgspec.Struct]) -> None:
    """Give the parser one flag for each field of the Struct."""
    for setting in settings_of(struct):
        shown = "" if setting.default in (msgspec.NODEFAULT, None, "", [], {}) else setting.default
        help_text = setting.help + (f" [{shown}]" if shown != "" else "")
        parser.add_argument(
            setting.flag, dest=setting.name, default=None, metavar=_metavar(setting),
            help=help_text.replace("%", "%%"),
        )


def _metavar(setting: Setting) -> str:
    inner, _ = _peel(setting.type)
    if typing.get_origin(inner) is typing.Literal:
        return "|".join(map(str, typing.get_args(inner)))
    return getattr(inner, "__name__", "value").upper()


def parse_flags(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> dict[str, Any]:
    """The arguments that were given, by destination.

    Raises ConfigError for an unknown flag, with the nearest that exists.
    """
    found, unknown = parser.parse_known_args(argv)
    if not unknown:
        return vars(found)
    name, _, value = unknown[0].partition("=")
    if not name.startswith("-"):
        raise ConfigError("argument", name, f"no such argument; see {parser.prog} --help")
    known = [flag for action in parser._actions for flag in action.option_strings]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"see {parser.prog} --help"
    shown = value or (unknown[1] if unknown[1:] else "?")
    raise ConfigError(name, "?" if _SECRET.search(name) else shown, f"no such flag; {hint}")


def read_file(path: str | Path | None) -> dict[str, Any]:
    """A TOML file as a dict; nothing where no path is given.

    Raises ConfigError where it can't be read, or is larger than any settings are.
    """
    if path is None:
        return {}
    try:
        with Path(path).open("rb") as file:
            body = file.read(LARGEST_FILE_BYTES + 1)
        if len(body) > LARGEST_FILE_BYTES:
            raise ValueError(f"it is larger than {LARGEST_FILE_BYTES} bytes")
        return tomllib.loads(body.decode())
    except RecursionError as error:
        raise ConfigError("--config", str(path), "give a TOML file less deeply nested") from error
    except (OSError, ValueError) as error:
        raise ConfigError("--config", str(path), f"give a readable TOML file ({error})") from error


def section(table: Mapping[str, Any], name: str) -> dict[str, Any]:
    """One `[name]` table of a file, empty where it is not there. Raises ConfigError."""
    found = table.get(name, {})
    if not isinstance(found, dict):
        raise ConfigError(name, found, f"write it as a table [{name}]")
    return dict(found)


def check_variables(known: Sequence[type[msgspec.Struct]], variables: Mapping[str, str]) -> None:
    """Refuse a variable `ROLLSTREAM_...` that is no field of these Structs. Raises ConfigError."""
    names = {setting.variable for struct in known for setting in settings_of(struct)}
    for name in variables:
        if not name.startswith(VARIABLE_PREFIX) or name in names:
            continue
        if not _FOREIGN_VARIABLE.fullmatch(name):
            raise unknown_key(name, sorted(names))


def resolve(
    struct: type[S],
    *,
    table: Mapping[str, Any] | None = None,
    variables: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> S:
    """The settings, of which a flag wins over a variable and a variable over the file's table.

    Raises ConfigError for an unknown key, a missing one or a value that does not fit.
    """
    settings = settings_of(struct)
    sources: dict[str, str] = {}
    values: dict[str, Any] = {}
    _take_table(struct, dict(table or {}), (), values, sources)
    env = os.environ if variables is None else variables
    for setting in settings:
        if (text := env.get(setting.variable)) is not None:
            _put(values, setting, parse(setting, text, setting.variable))
            sources[setting.name] = setting.variable
        if (given := (flags or {}).get(setting.name)) is not None:
            _put(values, setting, parse(setting, given, setting.flag))
            sources[setting.name] = setting.flag
    for setting in settings:
        _check_inside(setting, values, sources)
    try:
        return msgspec.convert(values, struct)
    except msgspec.ValidationError as error:
        raise _explained(struct, error, values, sources) from error


def _check_inside(setting: Setting, values: dict[str, Any], sources: dict[str, str]) -> None:
    """Refuse what msgspec lets pass: numbers that JSON can't carry, keys that no Struct has."""
    value: Any = values
    for part in setting.path:
        value = value.get(part) if isinstance(value, dict) else None
    source = sources.get(setting.name, setting.name)
    source = setting.name if source == "file" else source
    if (isinstance(value, float) and not math.isfinite(value)) or (
        isinstance(value, int) and not -(2**63) <= value < 2**63
    ):
        raise ConfigError(source, value, "give a finite number of at most 64 bits")
    if isinstance(value, str) and not value.isprintable():
        raise ConfigError(source, value, "give printable text, in one line")
    inner, _ = _peel(setting.type)
    struct = next((
        a for a in typing.get_args(inner)
        if isinstance(a, type) and issubclass(a, msgspec.Struct)
    ), None)
    if struct is None:
        return
    known = [field.encode_name for field in msgspec.structs.fields(struct)]
    listed = value if isinstance(value, list) else []
    entries = value.items() if isinstance(value, dict) else enumerate(listed)
    for at, entry in entries:
        for key in entry if isinstance(entry, dict) else ():
            if key not in known:
                raise unknown_key(
                    f"{source}.{at}.{key}", [f"{source}.{at}.{name}" for name in known]
                )


def _take_table(
    struct: type[msgspec.Struct], table: dict[str, Any], path: tuple[str, ...],
    values: dict[str, Any], sources: dict[str, str],
) -> None:
    hints = typing.get_type_hints(struct, include_extras=True)
    names = {f.encode_name: f.name for f in msgspec.structs.fields(struct)}
    for key, value in table.items():
        name = ".".join((*path, key))
        if key not in names:
            raise unknown_key(name, [".".join((*path, n)) for n in names])
        inner, _ = _peel(hints[names[key]])
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            if not isinstance(value, dict):
                raise ConfigError(name, value, f"write it as a table [{name}]")
            _take_table(inner, value, (*path, key), values.setdefault(key, {}), sources)
        else:
            values[key] = value
            sources[name] = "file"


def unknown_key(name: str, known: list[str]) -> ConfigError:
    """The refusal of a key that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"the keys are: {', '.join(sorted(known))}"
    return ConfigError(name, "?", f"no such setting; {hint}")


def parse(setting: Setting, given: Any, source: str) -> Any:
    """A flag's or variable's text as a value of the field's type.

    Raises ConfigError naming the source.
    """
    inner, _ = _peel(setting.type)
    if not isinstance(given, str) or inner is str or typing.get_origin(inner) is typing.Literal:
        return given
    try:
        if typing.get_origin(inner) in (list, dict) or inner in (list, dict):
            if typing.get_origin(inner) is list and not given.lstrip().startswith("["):
                return [part.strip() for part in given.split(",") if part.strip()]
            return msgspec.json.decode(given)
        return msgspec.convert(given, inner, strict=False)
    except (msgspec.MsgspecError, RecursionError) as error:
        wanted = "JSON" if inner is dict or typing.get_origin(inner) is dict else _metavar(setting)
        raise ConfigError(source, given, f"give {wanted.lower()} ({error})") from error


def _put(values: dict[str, Any], setting: Setting, value: Any) -> None:
    *tables, last = setting.path
    for name in tables:
        values = values.setdefault(name, {})
    values[last] = value


def _options(struct: type[msgspec.Struct], name: str) -> str:
    setting = next((s for s in settings_of(struct) if s.name == name), None)
    return ", ".join(map(str, typing.get_args(_peel(setting.type)[0]))) if setting else ""


def _explained(
    struct: type[msgspec.Struct], error: msgspec.ValidationError, values: dict[str, Any],
    sources: dict[str, str],
) -> ConfigError:
    text, _, where = str(error).partition(" - at `$")
    name = where.strip("`.") if where else text.partition("`")[2].partition("`")[0]
    value: Any = values
    for part in name.split("."):
        value = value.get(part, "?") if isinstance(value, dict) else "?"
    top, bracket, rest = name.partition("[")
    source = sources.get(top, "file")
    shown = top if source == "file" else source
    fix = text[0].lower() + text[1:]
    if "invalid enum value" in fix and (options := _options(struct, name)):
        fix = f"use one of: {options}"
    if "missing required" in fix:
        missing = text.partition("`")[2].partition("`")[0]
        if bracket:
            return ConfigError(f"{shown}[{rest}.{missing}", "(not given)", "give it")
        return ConfigError(name, "(not given)", f"give --{name.replace('_', '-')}")
    return ConfigError(shown + bracket + rest, value, fix)


def printable(settings: msgspec.Struct) -> str:
    """The resolved settings as TOML-like lines, in order, for `--print-config`."""
    lines = []
    plain = msgspec.to_builtins(settings)
    for setting in settings_of(type(settings)):
        value: Any = plain
        for part in setting.path:
            value = None if value is None else value.get(part)
        lines.append(f"{setting.name} = {msgspec.json.encode(value).decode()}")
    return "\n".join(lines)


def read_secret(name: str, variable: str | None, file: str | None) -> str | None:
    """A secret from a variable or a file, never from a flag or the settings themselves.

    Raises ConfigError naming the field where the file can't be read or the variable is not set.
    """
    if file:
        try:
            return Path(file).read_text().strip()
        except OSError as error:
            raise ConfigError(f"{name}_file", file, f"give a readable file ({error})") from error
    if variable:
        if variable not in os.environ:
            raise ConfigError(f"{name}_env", variable, "set this environment variable")
        return os.environ[variable]
    return None
