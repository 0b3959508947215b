"""Where an environment's module is: installed, or one of this project's own, and which version."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import json
import keyword
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

OWN_FOLDER = Path(__file__).resolve().parents[2] / "environments"
"""`environments/` of a checkout, `rollstream/environments` of a wheel."""


class EnvironmentUnusable(ValueError):
    """An environment that can't be loaded or used: one line with its id, the value and the fix."""

    def __init__(self, env: str, reason: str) -> None:
        super().__init__(f"environment {env!r}: {reason}".replace("\n", " "))
        self.env = env
        self.reason = reason

    def __reduce__(self) -> tuple[type[EnvironmentUnusable], tuple[str, str]]:
        return type(self), (self.env, self.reason)


def module_name(env_id: str) -> str:
    """verifiers' rule: owner and version are no part of it, dashes become underscores.

    Raises EnvironmentUnusable for what can't be a module's name.
    """
    name = env_id.replace("-", "_").split("/")[-1]
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in name.split(".")):
        raise EnvironmentUnusable(env_id, "no module can have this name: use letters, digits and _")
    return name


def import_module(env_id: str) -> ModuleType:
    """The environment's module: an installed one wins over this project's own.

    Raises EnvironmentUnusable where there is none, or where importing it raises.
    """
    name = module_name(env_id)
    try:
        if name not in sys.modules and _spec(name) is None:
            if not (OWN_FOLDER / name / "__init__.py").is_file():
                raise EnvironmentUnusable(env_id, _unknown(name))
            return _import_own(name)
        return importlib.import_module(name)
    except EnvironmentUnusable:
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentUnusable(
            env_id, f"importing {name} raised {type(error).__name__}: {error} "
            "(install or repair what it needs)"
        ) from error


def own_environments() -> list[str]:
    """The ids of the environments that ship with this project."""
    return sorted(path.parent.name for path in OWN_FOLDER.glob("*/__init__.py"))


def code_identity(module: ModuleType) -> str:
    """`name==version` of an installed package; the hash of its sources for anything editable."""
    name = module.__name__.split(".")[0]
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return _source_hash(module)
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        return _source_hash(module)
    return f"{name}=={distribution.version}"


def _spec(name: str) -> object:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:  # a dotted name without its parent
        return None


def _import_own(name: str) -> ModuleType:
    """As a top-level module, which is what verifiers looks for, without touching sys.path."""
    folder = OWN_FOLDER / name
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder} can't be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _source_hash(module: ModuleType) -> str:
    if module.__file__ is None:
        return ""
    file = Path(module.__file__)
    root = file.parent
    files = sorted(root.rglob("*.py")) if file.name == "__init__.py" else [file]
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return f"sha256:{digest.hexdigest()}"


def _unknown(name: str) -> str:
    known = own_environments() + _installed()
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return (
        f"no module {name!r} is installed here and this project has none of that name "
        f"(known: {', '.join(sorted(set(known)))}). {hint}Install its package here, e.g. "
        f"`pip install {name.replace('_', '-')} verifiers==0.3.1`"
    )


def _installed() -> list[str]:
    """Installed packages that ask for verifiers: environments, as far as one can tell."""
    return [
        distribution.name.replace("-", "_")
        for distribution in metadata.distributions()
        if any(need.startswith("verifiers") for need in distribution.requires or [])
        and distribution.name != "rollstream"
    ]
