"""The layout is the architecture: who may import whom, and what must not be imported early."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PURE = ("seen", "frontier", "groups", "partition", "ledger", "records", "arrays", "rewards", "step")
FORBIDDEN_IN_PURE = ("aiokafka", "aiohttp", "opentelemetry", "structlog", "time")
HEAVY = ("verifiers", "transformers", "torch", "vllm", "pyarrow", "datasets", "gguf", "tokenizers")


def imports(file: Path) -> set[str]:
    """Every module that a file names in an import, at any depth."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found


SHARED = sorted((ROOT / "shared").rglob("*.py"))
SERVICES = sorted((ROOT / "services").rglob("*.py"))


@pytest.mark.parametrize("file", SHARED, ids=lambda f: str(f.relative_to(ROOT)))
def test_shared_never_imports_a_service(file):
    assert not [name for name in imports(file) if name.startswith("rollstream.services")]


@pytest.mark.parametrize("file", SERVICES, ids=lambda f: str(f.relative_to(ROOT)))
def test_a_service_never_imports_another_one(file):
    own = file.relative_to(ROOT / "services").parts[0]
    if own == "cli":
        return
    others = [
        name for name in imports(file)
        if name.startswith("rollstream.services.") and name.split(".")[2] != own
    ]
    assert not others


@pytest.mark.parametrize("name", PURE)
def test_the_pure_core_does_no_io_and_reads_no_clock(name):
    found = imports(ROOT / "shared" / f"{name}.py")
    assert not [module for module in found if module.split(".")[0] in FORBIDDEN_IN_PURE]


def test_nothing_heavy_is_imported_by_a_command_or_a_service_that_starts():
    code = (
        "import sys, rollstream.services.cli.up, rollstream.services.cli.start, "
        "rollstream.shared.serve, rollstream.services.sink.service\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_the_resolved_packages_hold_no_torch_and_no_cuda():
    lines = (ROOT / "constraints" / "python.txt").read_text().lower().splitlines()
    names = {line.partition("==")[0] for line in lines if "==" in line}
    assert len(names) > 100
    assert not [n for n in names if n in ("torch", "triton") or n.startswith(("nvidia", "cuda"))]


def test_no_file_is_too_long():
    long = {
        str(f.relative_to(ROOT)): n
        for f in (*SHARED, *SERVICES, *sorted((ROOT / "tests").rglob("*.py")))
        if (n := len(f.read_text().splitlines())) > 420
    }
    assert not long
