"""Scoring in processes: hung, crashed and orphaned workers, and environments that differ."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from rollstream.shared.environments.locate import EnvironmentUnusable
from rollstream.shared.environments.scoring import score_group
from rollstream.shared.environments.v0 import load
from rollstream.shared.environments.workers import (
    FingerprintMismatch,
    ScoringPool,
    ScoringTimeout,
    WorkerDied,
)
from rollstream.shared.records import EnvRef, Row, Sample, Stop

DEEDS = '''
import os, subprocess, sys
from pathlib import Path
import verifiers as vf
from datasets import Dataset

def does(completion, deed_file, **kwargs):
    deed = completion[-1].content
    if deed.isdigit():
        print("printed by user code")
        os.write(1, b"written by user code")
        return float(deed)
    with open(deed_file, "a") as file:
        print(os.getpid(), file=file, flush=True)
    if deed == "spin":
        while True: ...
    if deed == "spin in C":
        sum(range(10**15))  # holds the GIL
    if deed == "start a child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(deed_file, "a") as file:
            print(child.pid, file=file, flush=True)
        child.wait()
    os._exit(3)

def load_environment():
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list([{"question": "q"}]), rubric=vf.Rubric(funcs=[does])
    )
'''

PARENT = """
import asyncio, sys, msgspec
from rollstream.shared.environments.workers import ScoringPool
from rollstream.shared.records import EnvRef, Row, Sample, Stop

async def main():
    pool = ScoringPool(1, timeout_s=300)
    said = [{"role": "assistant", "content": sys.argv[2]}]
    row = Row(prompt=[], columns={"deed_file": sys.argv[1]})
    await pool.score(EnvRef("deed_env"), row, [Sample(i=0, stop=Stop.STOP, completion=said)])

asyncio.run(main())
"""


pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def deeds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvRef]:
    folder = tmp_path_factory.mktemp("environments")
    (folder / "deed_env.py").write_text(DEEDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield load("deed_env", {}).ref


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(deeds: EnvRef) -> AsyncIterator[ScoringPool]:
    """One for all tests: starting a worker takes seconds, the imports of verifiers."""
    async with ScoringPool(1, timeout_s=60) as pool:
        yield pool


def group(*deeds: str) -> list[Sample]:
    return [
        Sample(i=i, stop=Stop.STOP, completion=[{"role": "assistant", "content": deed}])
        for i, deed in enumerate(deeds)
    ]


def row_for(tmp_path: Path) -> Row:
    return Row(
        prompt=[{"role": "user", "content": "q"}],
        columns={"deed_file": str(tmp_path / "pids")},
    )


def workers() -> list[psutil.Process]:
    mine = psutil.Process().children()
    return [child for child in mine if "environments.worker" in " ".join(child.cmdline())]


def pids(tmp_path: Path) -> list[int]:
    file = tmp_path / "pids"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


async def until(condition: Callable[[], object], within_s: float = 60) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.05)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_a_worker_scores_as_this_process_does(pool: ScoringPool) -> None:
    env = load("group_ranking", {"num_train": 5})
    row = env.rows("train")[0]
    samples = group(f"{row.answer}", "no", f"so it is {row.answer}")
    assert await pool.score(env.ref, row, samples) == await score_group(env, row, samples)


async def test_printing_code_and_many_groups_use_the_same_worker(
    pool: ScoringPool, deeds: EnvRef, tmp_path: Path
) -> None:
    row = row_for(tmp_path)
    for _ in range(3):
        scores = await pool.score(deeds, row, group("1", "2"))
        assert [score.reward for score in scores] == [1.0, 2.0]
    assert len(workers()) == 1


@pytest.mark.parametrize("deed", ["spin in C", "start a child"])
async def test_what_hangs_is_killed_with_its_children_and_replaced(
    pool: ScoringPool, deeds: EnvRef, tmp_path: Path, deed: str
) -> None:
    row = row_for(tmp_path)
    with pytest.raises(ScoringTimeout, match=r"scoring deed_env took more than 1 s"):
        await pool.score(deeds, row, group("1", deed), timeout_s=1)
    killed = pids(tmp_path)
    assert len(killed) == (2 if deed == "start a child" else 1)
    await until(lambda: all(map(gone, killed)))
    [score] = await pool.score(deeds, row, group("4"))
    assert score.reward == 4.0


async def test_a_worker_that_ends_is_noticed_and_replaced(
    pool: ScoringPool, deeds: EnvRef, tmp_path: Path
) -> None:
    row = row_for(tmp_path)
    with pytest.raises(WorkerDied, match="scoring deed_env"):
        await pool.score(deeds, row, group("exit"))
    scoring = asyncio.create_task(pool.score(deeds, row, group("spin")))
    await until(lambda: len(pids(tmp_path)) == 2)
    os.kill(pids(tmp_path)[1], signal.SIGKILL)
    with pytest.raises(WorkerDied):
        await scoring
    [score] = await pool.score(deeds, row, group("5"))
    assert score.reward == 5.0


async def test_a_cancelled_call_leaves_nothing_behind(
    pool: ScoringPool, deeds: EnvRef, tmp_path: Path
) -> None:
    row = row_for(tmp_path)
    scoring = asyncio.create_task(pool.score(deeds, row, group("spin")))
    await until(lambda: pids(tmp_path))
    scoring.cancel()
    await asyncio.wait([scoring])
    [score] = await pool.score(deeds, row, group("6"))
    assert score.reward == 6.0, "not the cancelled call's late answer"
    await until(lambda: gone(pids(tmp_path)[0]))


async def test_closing_ends_busy_workers(deeds: EnvRef, tmp_path: Path) -> None:
    pool = ScoringPool(1, timeout_s=300)
    scoring = asyncio.create_task(pool.score(deeds, row_for(tmp_path), group("spin in C")))
    await until(lambda: pids(tmp_path))
    await pool.close()
    with pytest.raises(WorkerDied):
        await scoring
    assert gone(pids(tmp_path)[0])
    with pytest.raises(WorkerDied, match="closed"):
        await pool.score(deeds, row_for(tmp_path), group("1"))


async def test_an_idle_worker_leaves_by_itself_when_its_stdin_ends() -> None:
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollstream.shared.environments.worker",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )
    assert worker.stdin is not None
    worker.stdin.close()
    assert await asyncio.wait_for(worker.wait(), 30) == 0


async def test_another_environment_is_refused_by_name(
    pool: ScoringPool, deeds: EnvRef, tmp_path: Path
) -> None:
    other = EnvRef(deeds.id, deeds.args, fingerprint="0" * 64)
    with pytest.raises(FingerprintMismatch) as caught:
        await pool.score(other, row_for(tmp_path), group("1"))
    assert "0" * 64 in str(caught.value)
    assert deeds.fingerprint in str(caught.value)
    with pytest.raises(EnvironmentUnusable, match="environment 'two_digits': no module"):
        await pool.check(EnvRef("two_digits"))
    with pytest.raises(EnvironmentUnusable, match="api 'v1' is not served here"):
        await pool.check(EnvRef("two_digit_addition", api="v1"))
    await pool.check(deeds)


async def test_a_killed_parent_takes_its_workers_along(deeds: EnvRef, tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(tmp_path / "pids"), "spin in C",
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        await until(lambda: pids(tmp_path))
        [worker] = pids(tmp_path)
        assert not gone(worker)
    finally:
        parent.kill()
        await asyncio.wait_for(parent.wait(), 10)
    await until(lambda: gone(worker), within_s=15)


async def test_the_pool_is_imported_without_verifiers() -> None:
    code = """
import json, sys
import rollstream.shared.environments.v0, rollstream.shared.environments.workers
print(json.dumps(sorted({"verifiers", "datasets", "pydantic"} & set(sys.modules))))
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert json.loads(out) == []
