"""Nothing waits for ever: a wait in the code has a deadline, or its line says why it needs none.

A wait counts as bounded when it stands inside `asyncio.timeout(...)` or `asyncio.wait_for(...)`, or
has a timeout of its own. Otherwise its line, or the one above, must hold `# waits: <reason>`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(p for room in ("shared", "services") for p in (ROOT / room).rglob("*.py"))

FOR_EVER = {
    "wait", "get", "put", "join", "acquire", "communicate", "gather", "send_and_wait", "getmany",
    "getone", "commit", "list_consumer_group_offsets", "describe_configs", "readline",
}
"""Method names that can wait for ever when nothing is given."""
LOCKS = ("lock", "semaphore", "condition", "changed", "one_at_a_time")


def bounded(call: ast.Call) -> bool:
    return any(word.arg in ("timeout", "timeout_ms", "timeout_s") for word in call.keywords)


def called(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def waits(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each wait that nothing bounds."""
    def visit(node: ast.AST, inside: bool) -> Iterator[tuple[int, str]]:
        if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef | ast.Lambda):
            inside = False
        if isinstance(node, ast.AsyncWith):
            for name in [called(item.context_expr) for item in node.items]:
                inside = inside or name == "timeout"
                if not inside and name.lower().lstrip("_").endswith(LOCKS):
                    yield node.lineno, f"async with {name}"
        if isinstance(node, ast.Call) and called(node) == "wait_for" and len(node.args) == 2:
            inside = True
        if isinstance(node, ast.Await) and isinstance(node.value, ast.Call) and not inside:
            call, name = node.value, called(node.value)
            one = name == "wait_for" and len(call.args) == 1
            has_own = bounded(call)
            if (name in FOR_EVER or one) and not has_own:
                yield node.lineno, name
        if isinstance(node, ast.Await) and isinstance(node.value, ast.Name) and not inside:
            yield node.lineno, f"await {node.value.id}"
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(tree, False)


def found(source: str) -> list[tuple[int, str]]:
    lines = source.splitlines()
    return [
        (line, name) for line, name in waits(ast.parse(source))
        if not any("# waits:" in lines[at] for at in (line - 1, max(0, line - 2)))
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_wait_has_a_deadline(path: Path):
    assert found(path.read_text()) == []


@pytest.mark.parametrize("line", [
    "await event.wait()", "await asyncio.wait(tasks)", "await queue.get()", "await task",
    "await condition.wait_for(ready)", "await producer.send_and_wait(topic)",
    "await consumer.getmany(tp)", "await asyncio.gather(*tasks)", "async with self._lock: pass",
    "await process.communicate()",
])
def test_it_finds_waits_without_one(line: str):
    assert found(f"async def f():\n    {line}\n")


@pytest.mark.parametrize("line", [
    "await asyncio.wait_for(event.wait(), 5)", "await asyncio.wait(tasks, timeout=5)",
    "await consumer.getmany(tp, timeout_ms=100)", "await event.wait()  # waits: for the end",
    "async with asyncio.timeout(5): await queue.get()", "await asyncio.sleep(5)",
])
def test_it_leaves_bounded_ones_alone(line: str):
    assert not found(f"async def f():\n    {line}\n")
