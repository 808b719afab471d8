"""What an archive lacks is captured again from the stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jetcapture_py import read_archive
from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.capture import recapture
from jetcapture_py.config.model import Config
from jetcapture_py.errors import JetcaptureError, PermanentStoreError, SourceError, StoreError
from jetcapture_py.store import LocalStore
from jetcapture_py.store.archive import ArchiveFiles, File
from jetcapture_py.verify import repair as module
from jetcapture_py.verify.findings import Kind, Report
from jetcapture_py.verify.proof import Evidence, verify
from jetcapture_py.verify.repair import Repair, verify_and_repair
from tests.support.archives import merge
from tests.support.nats_server import NatsServer
from tests.support.running import (
    CONSUMER,
    STREAM,
    Message,
    connection,
    consumer,
    objects,
    publish,
    publish_and_capture,
    rows,
)

Start = Callable[..., NatsServer]
JSON: dict[str, Any] = {"format": "json", "columns": {"id": "int64", "at": "timestamp[us, UTC]"}}
SMALL: dict[str, Any] = {"key": "{subject[1]}", "block": {"max_messages": 50}, "decode": JSON}


def order(index: int) -> bytes:
    """JSON with a time of the event; every tenth cannot be decoded."""
    if index % 10 == 3:
        return b"not JSON %d" % index
    return b'{"id": %d, "at": "2026-05-01T%02d:00:00Z"}' % (index, index % 5)


def orders(count: int) -> list[Message]:
    return [(f"orders.{'abc'[index % 3]}", order(index), [("Index", str(index))]) for index in range(count)]


def captured(nats_server: Start, root: Path, count: int = 600, **sections: Any) -> tuple[NatsServer, Config]:
    server = nats_server()
    return server, publish_and_capture(server.url, root, orders(count), **{**SMALL, **sections})


async def purge(server: NatsServer, *seqs: int, before: int | None = None) -> None:
    async with connection(server.url) as client:
        for seq in seqs:
            await client.jetstream().delete_msg(STREAM, seq)
        if before:
            await client.jetstream().purge_stream(STREAM, seq=before)


def repaired(found: Config) -> tuple[Report, Repair]:
    return asyncio.run(verify_and_repair(found))


def contents(root: Path) -> list[dict[str, Any]]:
    """All messages of archive and quarantine without what only says how they were delivered."""
    every = [row for quarantine in (False, True) for row in rows(root, quarantine=quarantine)]
    return [{name: value for name, value in row.items() if name != layout.DELIVERED} for row in every]


def remove(root: Path, names: Iterable[ObjectName]) -> int:
    """Remove objects; how many rows they had."""
    lost = list(names)
    for name in lost:
        (root / name.path).unlink()
    return sum(name.rows for name in lost)


def position(found: Any) -> tuple[Any, ...]:
    return found.ack_floor.stream_seq, found.delivered.stream_seq, found.num_ack_pending, found.num_redelivered


@pytest.mark.parametrize(
    "block",
    [{}, {"bundles": 2, "time": "at", "interval": "1h"}, {"format": "csv", "compression": "none"}],
    ids=["keys", "bundles and event time", "csv"],
)
def test_what_was_removed_is_captured_again_under_the_same_names(
    nats_server: Start, tmp_path: Path, block: dict[str, Any]
) -> None:
    root = tmp_path / "archive"
    server, found = captured(nats_server, root, block={"max_messages": 50, **block})
    names = objects(root)
    before = None if "format" in block else contents(root)
    data = {name.path: (root / name.path).read_bytes() for name in names if not name.parquet}
    floor = position(asyncio.run(consumer(server.url)))
    note = (root / f"_watermark/{STREAM}/{CONSUMER}.json").read_bytes()
    lost = [name for index, name in enumerate(names) if index % 2]
    assert {name.quarantine for name in lost} == {False, True}
    count = remove(root, lost)
    report, done = repaired(found)
    assert (report.complete, report.missing, report.count(Kind.DUPLICATES)) == (True, 0, 0)
    assert report.exit_code(strict=True) == 0
    assert (done.messages, done.stored, done.replaced, done.gone, done.unrepairable) == (count, len(lost), 0, (), ())
    assert done.quarantined == sum(name.rows for name in lost if name.quarantine)
    assert next(iter(done.lines(report))).endswith(f", {done.quarantined} messages went to the quarantine")
    assert objects(root) == names
    assert before is None or contents(root) == before
    assert {path: (root / path).read_bytes() for path in data} == data
    assert position(asyncio.run(consumer(server.url))) == floor
    assert (root / f"_watermark/{STREAM}/{CONSUMER}.json").read_bytes() == note


def test_a_repair_of_a_store_that_takes_nothing_fails_before_it_reads(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "archive"
    _, found = captured(nats_server, root, 100)
    remove(root, objects(root)[:1])

    async def refused(_: recapture.Recapture) -> None:
        raise PermanentStoreError("access denied")

    monkeypatch.setattr(recapture.Recapture, "check_store", refused)
    names = objects(root)
    with pytest.raises(PermanentStoreError, match="access denied"):
        repaired(found)
    assert objects(root) == names


def test_missing_sequences_that_are_close_are_read_at_once() -> None:
    assert list(module._runs(np.array([1, 3, 6]), 2)) == [(1, 3), (6, 6)]


def test_a_complete_archive_is_left_as_it_is(nats_server: Start, tmp_path: Path) -> None:
    root = tmp_path / "archive"
    _, found = captured(nats_server, root, 100)
    names = objects(root)
    report, done = repaired(found)
    assert (report.complete, done, objects(root)) == (True, Repair(), names)
    (line,) = done.lines(report)
    assert line == "repair: nothing was stored, because no message of the stream is known to be missing"


def test_a_damaged_object_is_replaced_under_its_name(nats_server: Start, tmp_path: Path) -> None:
    root = tmp_path / "archive"
    _, found = captured(nats_server, root)
    before, names = contents(root), objects(root)
    truncated, flipped = [name for name in names if not name.quarantine][2:4]
    for name in (next(name for name in names if name.quarantine), truncated, flipped):
        data = bytearray((root / name.path).read_bytes())
        data[-20] ^= 4
        (root / name.path).write_bytes(data[: len(data) // 2] if name is truncated else data)
    remove(root, names[:1])
    report, done = repaired(found)
    assert (report.complete, report.paths(Kind.DAMAGED), report.missing) == (True, (), 0)
    assert (done.replaced, done.stored) == (3, 4)
    assert objects(root) == names
    assert contents(root) == before


def test_what_the_stream_no_longer_has_is_named(nats_server: Start, tmp_path: Path) -> None:
    root = tmp_path / "archive"
    server, found = captured(nats_server, root, 300, key="", decode={"format": "raw"})
    first, second, *_ = objects(root)
    assert (first.first_seq, first.last_seq, second.last_seq) == (1, 50, 100)
    for name in (first, second):
        (root / name.path).write_bytes(b"nothing")
    asyncio.run(purge(server, before=31))
    report, done = repaired(found)
    assert [(each.path, each.first, each.last) for each in done.unrepairable] == [(first.path, 1, 30)]
    assert [each.path for each in report.paths(Kind.DAMAGED)] == [first.path]
    assert (done.messages, done.replaced, report.missing, report.exit_code()) == (70, 1, 0, 1)
    assert [finding.action for finding in report.of(Kind.DAMAGED)] == [""], "this was it"
    text = list(done.lines(report))
    assert text[0] == "repair: 70 messages stored in 2 objects, 1 replaced a damaged one"
    assert text[3:] == [
        "cannot be repaired: neither the stream nor another object has these sequences",
        f"  1 to 30: {first.path} is damaged",
        "readers fail on the remaining damaged objects: restore them from a copy, or remove them",
    ]
    again, nothing = repaired(found)
    assert (nothing.stored, again.missing) == (0, 0)
    (root / first.path).unlink()
    assert asyncio.run(verify(found)).complete


@pytest.mark.parametrize("damage", [slice(4, 40), slice(-100, None)], ids=["page", "footer"])
def test_a_damaged_object_whose_messages_are_all_elsewhere_is_moved_aside(
    nats_server: Start, tmp_path: Path, damage: slice
) -> None:
    root = tmp_path / "archive"
    server, found = captured(nats_server, root, 300)
    of_key = [name for name in objects(root) if name.key == "a"]
    merge(root, of_key, keep=True)
    # no object has these any more: sequences alone do not tell what was in an object
    asyncio.run(purge(server, 2, 30))
    remove(root, [name for name in objects(root) if name.key in ("b", "c")][:1])
    assert repaired(found)[1].stored == 1
    path = root / of_key[0].path
    data = bytearray(path.read_bytes())
    data[damage] = bytes(len(data[damage]))
    path.write_bytes(data)
    files, advice = ArchiveFiles(str(root), {}), "jetcapture verify CONFIG --deep --repair"
    with pytest.raises(StoreError, match=advice) as caught, files.parquet(files.at(of_key[0].path)) as parquet:
        parquet.read()
    assert of_key[0].path in str(caught.value)
    if damage.stop is None:  # every query needs the footer
        with pytest.raises(JetcaptureError, match=advice):
            read_archive(str(root), STREAM).read_all()
    report, done = asyncio.run(verify_and_repair(found, deep=True))
    aside = f"{of_key[0].directory}/.{path.name}.damaged"
    assert (done.stored, done.moved, done.unrepairable, report.exit_code(strict=True)) == (0, (aside,), (), 0)
    assert (path.exists(), (root / aside).exists(), report.complete) == (False, True, True)
    moved = "moved aside: 1 damaged object, because other objects have all their messages"
    assert list(done.lines(report))[1:] == [moved, f"  {aside}"]
    seqs = read_archive(str(root), STREAM).read_all()[layout.SEQ].to_pylist()
    assert {*range(of_key[0].first_seq, of_key[0].last_seq + 1, 3)} <= {*seqs, *range(4, 300, 10)}


def test_an_object_that_cannot_be_read_or_stored_keeps_no_other_from_being_repaired(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "archive"
    _, found = captured(nats_server, root, 300)
    names = objects(root)
    unread, denied, *others = [name for name in names if not name.quarantine][:4]
    remove(root, [denied, *others])
    real, put = ArchiveFiles.read, LocalStore.put
    monkeypatch.setattr(recapture, "RETRY_FOR", 0.0)

    def read(files: ArchiveFiles, file: File, *bounds: Any) -> bytes:
        if file.path == unread.path:
            raise StoreError(f"cannot read {file.path}: timed out")
        return real(files, file, *bounds)

    def refuse(store: LocalStore, name: ObjectName, data: Any) -> str:
        if name == denied:
            raise PermanentStoreError("access denied")
        return put(store, name, data)

    with monkeypatch.context() as patched:
        patched.setattr(ArchiveFiles, "read", read)
        patched.setattr(LocalStore, "put", refuse)
        report, done = repaired(found)
    assert (report.paths(Kind.DAMAGED), report.missing, report.exit_code()) == ((), unread.rows + denied.rows, 1)
    assert any(f"{unread.path}: cannot read" in finding.summary for finding in report.of(Kind.NOT_CHECKED))
    assert (done.messages, done.skipped) == (sum(name.rows for name in others), unread.rows)
    assert done.errors == (f"{denied.path}: access denied",)
    assert objects(root) == [name for name in names if name != denied], "no copy of what cannot be read"
    assert next(iter(Repair(skipped=1).lines(report))) == "repair: nothing was stored"
    assert repaired(found)[0].complete


def test_a_stream_that_is_created_again_meanwhile_is_not_taken_for_the_archived_one(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, real = tmp_path / "archive", module.prove
    server, found = captured(nats_server, root, 100)
    remove(root, objects(root)[:1])
    names = objects(root)

    async def verified(*arguments: Any, **named: Any) -> Evidence:
        evidence = await real(*arguments, **named)
        async with connection(server.url) as client:
            await client.jetstream().delete_stream(STREAM)
        await publish(server.url, orders(100))
        return evidence

    monkeypatch.setattr(module, "prove", verified)
    with pytest.raises(SourceError, match="was deleted and created again; nothing was stored"):
        repaired(found)
    assert objects(root) == names
