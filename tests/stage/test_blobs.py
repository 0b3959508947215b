"""What is too big for a topic, through a real store: missing, corrupt, late, orphaned objects."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from making import run

from rollstream.shared import blobs as blobs_module
from rollstream.shared.blobs import (
    BlobCorrupt,
    BlobMissing,
    Blobs,
    StoreUnreachable,
    check_uri,
)
from rollstream.shared.codec import decode, encode
from rollstream.shared.config import ConfigError
from rollstream.shared.records import EnvRef, Prompt, Rollout, Row, Scored, Stop, group_of
from rollstream.shared.runs import BlobSettings, RunConfig

LONG = "x" * 3000


class Topic:
    """Keeps what a Writer would have sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, list[tuple[str, bytes]]]] = []

    async def send_bytes(
        self, topic: str, partition: int, key: bytes, body: bytes, headers: Any
    ) -> int:
        self.sent.append((body, headers))
        return len(self.sent) - 1

    @property
    def last(self) -> Any:
        return decode(*self.sent[-1])


def config(folder: Path, above_bytes: int = 1000) -> RunConfig:
    return run(blobs=BlobSettings(folder.as_uri(), above_bytes))


def rollout(i: int = 0, text: str = LONG) -> Rollout:
    return Rollout(
        run="r", pipeline="rl", n=3, i=i, k=2, env=EnvRef("e"), stop=Stop.STOP,
        row=Row(prompt=[{"role": "user", "content": text}]), state={"turns": [text]},
        completion=[{"role": "assistant", "content": f"{text} {i}"}], prompt_offset=9,
    )


async def sent(store: Blobs, record: Any) -> Any:
    topic = Topic()
    await store.send(topic, "p.r.rl.rollouts", 1, record, key="r/3")  # type: ignore[arg-type]
    return topic


def objects(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("record", [
    Prompt(run="r", pipeline="rl", n=3, i=1, k=2, env=EnvRef("e"), row=Row(
        prompt=[{"role": "user", "content": LONG}])),
    rollout(), group_of([rollout(0), rollout(1)]),
], ids=["prompt", "rollout", "group"])
async def test_a_big_record_leaves_its_bodies_and_gets_them_back(tmp_path: Path, record: Any):
    store = Blobs(config(tmp_path))
    before = msgspec.json.encode(record)
    topic = await sent(store, record)
    assert msgspec.json.encode(record) == before, "the record itself is untouched"
    body, headers = topic.sent[0]
    assert len(body) < 1000
    assert LONG.encode() not in body
    assert dict(headers)["rs-group"] == b"3"
    light = topic.last
    assert light.bodies.size_bytes == objects(tmp_path)[0].stat().st_size
    await store.fill(light)
    assert msgspec.json.encode(light) == before


async def test_a_small_record_and_a_run_without_a_store_leave_nothing(tmp_path: Path):
    await sent(Blobs(config(tmp_path, 1_000_000)), rollout())
    assert objects(tmp_path) == []
    topic = await sent(Blobs(run()), rollout())
    assert topic.last == rollout()


async def test_a_retry_writes_the_same_object_and_another_content_another(tmp_path: Path):
    store = Blobs(config(tmp_path))
    for _ in range(2):
        await sent(store, rollout())
    assert len(objects(tmp_path)) == 1
    await sent(store, rollout(text=LONG + "y"))
    assert len(objects(tmp_path)) == 2


async def test_what_is_known_without_the_bodies_stays_in_the_record(tmp_path: Path):
    light = (await sent(Blobs(config(tmp_path)), rollout(1))).last
    assert (light.n, light.i, light.k, light.stop, light.prompt_offset) == (3, 1, 2, Stop.STOP, 9)


async def test_a_missing_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(blobs_module, "LATE_PAUSES_S", (0.01, 0.01))
    store = Blobs(config(tmp_path))
    light = (await sent(store, rollout())).last
    objects(tmp_path)[0].unlink()
    with pytest.raises(BlobMissing, match="is not there"):
        await store.fill(light)
    assert light.bodies is not None, "it can be tried again"


async def test_an_object_of_another_store_is_never_read(tmp_path: Path):
    light = (await sent(Blobs(config(tmp_path / "a")), rollout())).last
    with pytest.raises(BlobMissing, match="not in this run's store"):
        await Blobs(config(tmp_path / "b")).fill(light)


@pytest.mark.parametrize("damage", [
    lambda content: content[:-1], lambda content: b"\x00" + content[1:], lambda content: b"",
], ids=["short", "flipped", "empty"])
async def test_a_corrupt_object(tmp_path: Path, damage: Any):
    store = Blobs(config(tmp_path))
    light = (await sent(store, rollout())).last
    path = objects(tmp_path)[0]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(BlobCorrupt, match="not what was written"):
        await store.fill(light)


async def test_a_late_object_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(blobs_module, "LATE_PAUSES_S", (0.05,) * 100)
    store = Blobs(config(tmp_path))
    light = (await sent(store, rollout())).last
    path = objects(tmp_path)[0]
    aside = path.rename(tmp_path / "aside")

    async def appear() -> None:
        await asyncio.sleep(0.3)
        aside.rename(path)

    task = asyncio.create_task(appear())
    await store.fill(light)
    await task
    assert light == rollout()


@pytest.mark.parametrize("empty", [False, True], ids=["no-folder", "another-folder"])
async def test_a_store_that_fails_is_no_missing_object(tmp_path: Path, *, empty: bool):
    folder = tmp_path / "store"
    store = Blobs(config(folder))
    light = (await sent(store, rollout())).last
    folder.rename(tmp_path / "unmounted")
    if empty:
        folder.mkdir()
    for reader in (store, Blobs(config(folder))):
        with pytest.raises(StoreUnreachable, match="is it mounted"):
            await reader.fill(light)
    if empty:
        folder.rmdir()
    (tmp_path / "unmounted").rename(folder)
    await store.fill(light)
    assert light == rollout()


async def test_the_objects_of_a_run_are_listed_and_removed(tmp_path: Path):
    store = Blobs(config(tmp_path))
    for i in range(2):
        await sent(store, rollout(i))
    other = Blobs(run(run="r2", blobs=BlobSettings(tmp_path.as_uri(), 1000)))
    await sent(other, rollout())
    found = await store.objects()
    assert len(found) == 2
    await store.remove([one.uri for one in found])
    assert len(objects(tmp_path)) == 1


@pytest.mark.parametrize(
    "uri", ["ftp://x/y", "/folder", "s3://", "file://", "blobs", "file://data/blobs", "file:///"]
)
def test_a_bad_uri_names_the_field_and_the_fix(uri: str):
    with pytest.raises(ConfigError, match=r"blobs.uri = .*: give file:///folder"):
        check_uri(uri)


@pytest.mark.parametrize("uri", ["s3://id:hush@bucket/x", "gs://bucket/x?key=hush"])
def test_a_run_never_holds_credentials(uri: str):
    with pytest.raises(ConfigError, match="leave credentials and options out") as refused:
        check_uri(uri)
    assert "hush" not in str(refused.value)


async def test_a_folder_is_made_by_the_first_object_not_by_looking(tmp_path: Path):
    store = Blobs(config(tmp_path / "a b"))
    assert await store.objects() == []
    assert not (tmp_path / "a b").exists()
    light = (await sent(store, rollout())).last
    await store.fill(light)
    (one,) = objects(tmp_path / "a b")
    assert [found.uri.endswith(one.name) for found in await store.objects()] == [True]


async def test_what_a_kill_leaves_of_an_object_is_listed_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Nothing has the object's name before all of it is on the disk."""
    synced: list[int] = []
    real = os.fsync

    def sync(descriptor: int) -> None:
        synced.append(len(objects(tmp_path)))
        real(descriptor)

    def killed(source: Path, target: Path) -> None:
        assert synced, "named before it was synced"
        os.link(source, tmp_path / f"{config(tmp_path).prefix}/r/l/rollouts/.left.tmp")
        raise OSError("killed here")

    monkeypatch.setattr("rollstream.shared.durable.os.fsync", sync)
    monkeypatch.setattr("rollstream.shared.durable.os.replace", killed)
    store = Blobs(config(tmp_path))
    with pytest.raises(StoreUnreachable, match="killed here"):
        await sent(store, rollout())
    left = await store.objects()
    assert [one.uri.rpartition("/")[2] for one in left] == [".left.tmp"]
    await store.remove([one.uri for one in left])
    assert objects(tmp_path) == []


@pytest.mark.parametrize("format", ["json", "msgpack"])
async def test_bodies_come_back_as_the_record_itself_would(tmp_path: Path, format: Any):
    """An integer key is text in JSON, and JSON takes integers of any size."""
    record = rollout()
    record.state = {"by_turn": {1: "a"}}
    if format == "json":
        record.row.info = {"answer": 2**80}
    topic = Topic()
    await Blobs(config(tmp_path)).send(
        topic, "p.r.rl.rollouts", 1, record, key="r/3", format=format,  # type: ignore[arg-type]
    )
    light = topic.last
    await Blobs(config(tmp_path)).fill(light)
    assert light == decode(*encode(record, format))


def test_a_scored_group_keeps_its_identity_in_the_record():
    assert {"n", "k", "kind", "reason", "redrives", "bodies"} <= set(Scored.__struct_fields__)
