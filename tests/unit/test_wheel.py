"""A wheel holds all that a checkout does, though the folders are behind links in src/."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVICES = {"prompt-producer", "generator", "scorer", "teacher-distiller", "sink"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a wheel of this checkout was unpacked in."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("src", "shared", "services", "environments"):
        shutil.copytree(
            ROOT / name, source / name, symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
        )
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
         "--wheel-dir", str(folder), str(source)],
        check=True, timeout=100,
    )
    (wheel,) = folder.glob("rollstream-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    shutil.rmtree(source)
    return folder / "installed"


def sources(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder)) for path in folder.rglob("*")
        if path.suffix in (".py", ".toml", ".jinja")
    }


@pytest.mark.parametrize("folder", ["shared", "services", "environments"])
def test_the_wheel_holds_every_file_of_the_folders_behind_the_links(installed, folder):
    assert sources(installed / "rollstream" / folder) == sources(ROOT / folder)
    assert (installed / "rollstream" / "py.typed").exists()


def test_an_installed_wheel_works_beside_a_folder_named_shared(installed, tmp_path):
    """Beside a trainer's own `shared` package; and its environments are the wheel's own."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "__init__.py").write_text("whose = 'trainer'\n")
    program = (
        "import json, shared, rollstream.shared.records as records\n"
        "from rollstream.shared.routes import builtin\n"
        "from rollstream.shared.service import installed\n"
        "from rollstream.shared.environments import locate\n"
        "print(json.dumps([shared.whose, records.__file__, len(builtin()), sorted(installed()),\n"
        "    {name: locate.import_module(name).__file__ for name in locate.own_environments()}]))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": str(installed)}, check=True,
    )
    whose, records, routes, services, environments = json.loads(result.stdout)
    assert whose == "trainer"
    assert records == str(installed / "rollstream" / "shared" / "records.py")
    assert routes > 0
    assert set(services) == SERVICES
    own = installed / "rollstream" / "environments"
    assert environments == {
        path.parent.name: str(own / path.parent.name / "__init__.py")
        for path in (ROOT / "environments").glob("*/__init__.py")
    }
