"""Notes of stored objects say what their footers say, of exactly the objects that were stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from jetcapture_py.archive import object_notes
from jetcapture_py.archive.layout import BlockId
from jetcapture_py.archive.object_notes import MARGIN, NoteWriter, decode, hash_of
from jetcapture_py.archive.schema import ENVELOPE
from jetcapture_py.archive.writer import EncodedBlock, Encoder
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.maintain.inventory import NotedObjects
from jetcapture_py.reading.plan import list_objects, read_facts
from jetcapture_py.store.archive import open_archive
from tests.support.archives import HOUR, put


def encoded(seq: int, *, bundles: int = 0, times: list[int | None] | None = None, **columns: Any) -> EncodedBlock:
    own: dict[str, list[Any]] = {
        "_nats_subject": ["a"] * 2,
        "_nats_seq": [seq, seq + 1],
        "_nats_timestamp": [HOUR * 1_000_000 + seq] * 2,
    }
    arrays = [pa.array(own.get(field.name, [None] * 2), field.type) for field in ENVELOPE]
    batch = pa.RecordBatch.from_arrays(arrays, schema=ENVELOPE)
    if times is not None:
        columns["_nats_time"] = pa.array(times, pa.timestamp("us", "UTC"))
    if bundles:
        columns["key"] = pa.array(["eu"] * 2)
    for name, values in columns.items():
        batch = batch.append_column(name, values if isinstance(values, pa.Array) else pa.array(values))
    encoder = Encoder(stream="ORDERS", interval=900, compression="zstd", consumer="archive", bundles=bundles)
    block = BlockId(key=None if bundles else "eu", bucket=HOUR, bundle="03" if bundles else "")
    return encoder.encode(block, "age", [batch])


OBJECTS = {
    "plain": {"v": [1, 2]},
    "nested": {"v": [{"a": [1.5], "b": {"c": "x"}}, None]},
    "types": {
        "small": pa.array([1, 2], pa.uint8()),
        "span": pa.array([1, 2], pa.duration("us")),
        "word": pa.array(["x", "y"], pa.large_string()),
        "kind": pa.array(["x", "y"]).dictionary_encode(),
        "nothing": pa.nulls(2),
    },
    "bundles": {"bundles": 16},
    "timed": {"times": [HOUR * 1_000_000, HOUR * 1_000_000 + 1]},
    "untimed": {"times": [HOUR * 1_000_000, None]},
}


def write(root: Path, writer: NoteWriter) -> list[str]:
    due = writer.due()
    for path, content, count in due:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
        writer.wrote(path, count)
    return [path for path, _, _ in due]


def test_notes_say_what_the_footers_say_and_only_of_what_was_stored(tmp_path: Path) -> None:
    writer = NoteWriter("ORDERS")
    stored = {name: encoded(10 * number, **given) for number, (name, given) in enumerate(OBJECTS.items(), 1)}
    for each in stored.values():
        put(tmp_path, each)
        writer.record(each.name, each.data)
    assert len(write(tmp_path, writer)) == 1
    assert writer.due() == []
    archive = open_archive(str(tmp_path), {})
    listing, untimed = list_objects(archive, "ORDERS"), set[Any]()
    facts = read_facts(archive, listing.objects, listing, untimed=untimed)
    noted = NotedObjects(archive, "ORDERS")
    files = {name.path: (file.size, int(file.modified or 0)) for name, file in listing.files.items()}
    kinds = noted.kinds(files)
    assert len(kinds) == len(OBJECTS)
    for name in listing.objects:
        kind = kinds[name.path]
        serialized = facts.schemas[facts.schema_of[name]].serialize()
        assert noted.schema(kind).equals(pa.ipc.read_schema(pa.BufferReader(serialized)), check_metadata=True)
        assert (kind.interval, kind.bundles) == (facts.intervals[name], facts.bundles.get(name, 0))
        assert kind.untimed == (name in untimed)
    assert {name for name, each in stored.items() if kinds[each.name.path].untimed} == {"untimed"}
    path, (size, modified) = stored["plain"].name.path, files[stored["plain"].name.path]
    for changed in ((size + 1, modified), (size, modified + MARGIN + 2), (size, 0)):
        assert noted.kinds({**files, path: changed}).keys() == files.keys() - {path}
    other = NoteWriter("ORDERS")  # another replica stored it as well, with another column
    other.record(stored["plain"].name, stored["plain"].data)
    content = other.due()[0][1].replace(b'"interval":900', b'"interval":60')
    (tmp_path / other.due()[0][0]).write_bytes(content)
    assert NotedObjects(archive, "ORDERS").kinds(files).keys() == files.keys() - {path}, "contradicted"
    for note in (tmp_path / "_objects").rglob("*.json"):
        note.write_bytes(b"{")
    assert NotedObjects(archive, "ORDERS").kinds(files) == {}, "damaged notes only cost the reading of footers"


def test_a_note_is_written_again_until_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_notes, "MAX_OBJECTS", 3)
    writer = NoteWriter("ORDERS")
    for seq in (10, 20):
        each = encoded(seq)
        writer.record(each.name, each.data)
    ((first, _, count),) = writer.due()
    each = encoded(30)
    writer.record(each.name, each.data)  # while it is written
    writer.wrote(first, count)
    each = encoded(40)
    writer.record(each.name, each.data)
    paths = write(tmp_path, writer)
    assert paths[0] == first
    assert [len(decode((tmp_path / path).read_bytes(), "ORDERS", path).hashes) for path in paths] == [3, 1]
    writer.record(each.name, each.data)
    writer.forget()
    assert writer.due() == []


def test_a_note_is_as_old_as_its_name_and_only_some_wait_to_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    now, each = 1_700_000_000.0, encoded(10)
    monkeypatch.setattr(object_notes.time, "time", lambda: now)
    monkeypatch.setattr(object_notes, "_MAX_UNWRITTEN", 2)
    writer = NoteWriter("ORDERS")
    for _ in range(4):
        now += 3 * object_notes.MAX_AGE  # nothing was stored
        writer.record(each.name, each.data)
    due = [(object_notes.begun(path), decode(content, "ORDERS", path)) for path, content, _ in writer.due()]
    expected = [now - 6 * object_notes.MAX_AGE, now - 3 * object_notes.MAX_AGE, now]
    assert [(begun, note.stored.tolist()) for begun, note in due] == [(at, [at]) for at in expected]


def test_what_is_no_note_of_the_stream_is_refused() -> None:
    writer = NoteWriter("ORDERS")
    each = encoded(10)
    writer.record(each.name, each.data)
    content = writer.due()[0][1]
    assert decode(content, "ORDERS", "x").hashes.tolist() == [hash_of(each.name.path)]
    damaged = (content[:40], content.replace(b'"format":1', b'"format":2'), content.replace(b",0,1", b",7,1"))
    for data in (*damaged, b"[]", b"null"):
        with pytest.raises(JetcaptureError, match="not a note of objects"):
            decode(data, "ORDERS", "x")
    with pytest.raises(JetcaptureError):
        decode(content, "EVENTS", "x")
    empty = decode(b'{"format":1,"stream":"ORDERS","kinds":[],"objects":[]}', "ORDERS", "x")
    assert empty.kinds_of(np.array([1], np.uint64), np.array([1]), np.array([1])) == {}
