"""What a capture notes of its objects, and what the table, maintenance and erasure do with it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog import load_catalog

from jetcapture_py import read_archive
from jetcapture_py.archive import object_notes
from jetcapture_py.archive.object_notes import NoteWriter
from jetcapture_py.config.model import Config
from jetcapture_py.maintain.maintenance import Maintenance
from jetcapture_py.rewriting.erase import erase
from jetcapture_py.rewriting.selectors import SequenceSelector
from tests.support.archives import HOUR, Archive, encoded, put
from tests.support.nats_server import NatsServer
from tests.support.running import capture_all, config, objects, publish

Start = Callable[..., NatsServer]


def captured(url: str, root: Path, **maintain: Any) -> Config:
    """Capture messages of three keys with columns of several types, and some that cannot be decoded."""
    asyncio.run(publish(url, []))
    payloads = [b'{"v": %d}', b'{"v": %d.5}', b'{"v": "%d"}']
    messages = [
        (f"orders.{number % 3}", (payloads[number % 3] if number % 4 else b"%d {") % number, None)
        for number in range(48)
    ]
    asyncio.run(publish(url, messages))
    settings = config(
        url,
        root / "archive",
        decode={"format": "json"},
        key="{subject[1]}",
        block={"max_messages": 5},
        maintain=maintain,
    )
    asyncio.run(capture_all(settings))
    return settings


def notes(root: Path) -> list[Path]:
    return sorted((root / "archive" / "_objects").rglob("*.json"))


def test_a_table_of_captured_objects_needs_no_footer_that_a_note_tells(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db"}
    table = {"name": "nats.orders", "catalog": catalog, "quarantine": "nats.dead"}
    record = NoteWriter.record

    def beside_the_loop(*arguments: Any) -> None:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        record(*arguments)

    monkeypatch.setattr(NoteWriter, "record", beside_the_loop)
    settings = captured(nats_server().url, tmp_path, table=table)
    archive = tmp_path / "archive"
    next((archive / "_watermark").iterdir()).unlink()  # or the last bucket is not complete
    assert len(notes(tmp_path)) == 1
    again = archive / next(name.path for name in objects(archive) if not name.quarantine)
    os.utime(again, (time.time() + 3600, time.time() + 3600))  # as if it had been stored once more, after the note
    maintenance = Maintenance(settings)
    later = time.time() + 86_400
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.time", lambda: later)
        result = maintenance.run()
    assert result.errors == []
    assert {part: each.opened for part, each in result.tables.items()} == {"messages": 1, "quarantine": 0}
    with load_catalog("jetcapture", **catalog) as loaded:
        orders = loaded.load_table("nats.orders")
        rows = orders.scan(selected_fields=("key", "_nats_seq", "_nats_payload")).to_arrow()
        dead = loaded.load_table("nats.dead").scan().to_arrow()
    expected = read_archive(str(archive), "ORDERS", columns=["key", "_nats_seq", "_nats_payload"]).read_all()
    by_seq = [("_nats_seq", "ascending")]
    assert rows.select(expected.schema.names).sort_by(by_seq).to_pylist() == expected.sort_by(by_seq).to_pylist()
    assert dead.num_rows == 12
    assert "v" in orders.schema().column_names


@pytest.mark.parametrize("section", [{"compact": {"after": "0s", "grace": "0s"}}, {"keep": "1s"}])
def test_a_note_of_objects_that_are_all_gone_is_removed(tmp_path: Path, section: dict[str, Any]) -> None:
    archive, age = Archive(tmp_path / "archive"), 3 * object_notes.MAX_AGE
    writer = object_notes.NoteWriter("ORDERS")
    for seq in (1, 2, 3):
        block = encoded([(seq, HOUR * 1_000_000 + seq)], bucket=HOUR)
        put(archive.root, block)
        writer.record(block.name, block.data)
    ((_, content, _),) = writer.due()
    at = f"{datetime.fromtimestamp(time.time() - age, UTC):%Y%m%dT%H%M%SZ}"
    (archive.root / "_objects" / "ORDERS").mkdir(parents=True)
    note = archive.root / "_objects" / "ORDERS" / f"{at}-0123456789abcdef.json"
    note.write_bytes(content)
    stranger = note.with_name("README.json")
    stranger.touch()
    settings = config("nats://127.0.0.1:1", archive.root, maintain=section)
    maintenance = Maintenance(settings)
    maintenance.run()
    if "compact" in section:
        assert note.exists()
        assert maintenance.finish().removed == 3
        maintenance.run()
    assert (note.exists(), stranger.exists()) == (False, True)


def test_an_erasure_removes_the_notes_which_name_columns(nats_server: Start, tmp_path: Path) -> None:
    settings = captured(nats_server().url, tmp_path)
    assert notes(tmp_path)
    asyncio.run(erase(settings, SequenceSelector(1, 1), "asked for"))
    assert not notes(tmp_path)
