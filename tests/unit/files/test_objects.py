"""Messages of one subject in the objects of an archive, whatever their order there."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from jetcapture_py.archive.layout import BlockId
from jetcapture_py.files.reading import StoreObjects
from jetcapture_py.store import archive
from jetcapture_py.store.archive import ArchiveFiles, File
from tests.support.archives import put
from tests.unit.archive.test_writer import ENCODER, batch, plain


def test_messages_of_a_subject_come_in_order_out_of_bundles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, readers = ArchiveFiles.read, set[threading.Thread]()

    def recorded(storage: ArchiveFiles, file: File, start: int = 0, end: int | None = None) -> bytes:
        readers.add(threading.current_thread())
        return read(storage, file, start, end)

    monkeypatch.setattr(ArchiveFiles, "read", recorded)
    monkeypatch.setattr(ArchiveFiles, "local", False)  # Arrow reads local files without Python
    monkeypatch.setattr(archive, "SMALL", 0)
    for first, last in ((1, 900), (600, 1500), (1501, 1600)):
        identities = plain(last - first + 1, start=first)
        rows = batch(identities, key=pa.array([f"k{seq * 7 % 5}" for seq, _ in identities]))
        encoder = replace(ENCODER, bundles=1)
        put(tmp_path, encoder.encode(BlockId(key=None, bundle="0", bucket=1_700_000_100), "age", [rows]))
    objects = StoreObjects(ArchiveFiles(str(tmp_path), {}), ENCODER.stream)
    found = [int(payload.split(b"/")[0]) for payload in objects.payloads("s.0", 1550, 10_000)]
    assert found == list(range(3, 1550, 3))
    assert len(list(objects.payloads("s.1", 1550, 20))) >= 20
    assert len(list(objects.rows("s."))) == 900 + 901 + 100
    assert objects.start_of(None) == 0
    assert readers
    # one that Arrow has started would end the process with SIGABRT if it still had the file at the interpreter's exit
    assert not any(isinstance(thread, threading._DummyThread) for thread in readers)
