"""What every store gives back: its objects, listed, read in parts, and proven."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.errors import VanishedError
from jetcapture_py.reading.arrow import read_archive
from jetcapture_py.store.archive import SMALL, ArchiveFiles
from jetcapture_py.store.objects import ObjectStore
from jetcapture_py.verify.examine import ObjectExaminer
from jetcapture_py.verify.scan import survey
from tests.integration.store.conftest import Place
from tests.support.archives import encoded, write_parquet

BLOCKS = (
    encoded([(1, 5), (2, 6), (4, 7)], key="eu"),
    encoded([(3, 6)], key="a/b"),
    encoded([(5, 6)], key=None),
    encoded([(9, 9)], quarantine=True),
)


OTHER = encoded([(1, 5)], stream="ORDERS2")


def test_what_was_stored_is_listed_read_and_proven_wherever_the_key_is_in_the_address(place: Place) -> None:
    for suffix in ("/a", "/b/{key}", "/c/for-{key}/nats"):
        check(place, suffix)


def check(place: Place, suffix: str) -> None:
    """Store objects, and read them back in every way."""
    shelf = ArchiveFiles(place.url + suffix, place.options)
    assert list(shelf.files("ORDERS")) == []
    store = place.open(suffix)
    for block in (*BLOCKS, OTHER):
        store.put(block.name, block.data)
    files = {file.name: file for file in shelf.files("ORDERS")}
    assert files.keys() == {block.name for block in BLOCKS}
    for block in BLOCKS:
        file, data = files[block.name], block.data.to_pybytes()
        assert file.size == len(data)
        assert shelf.read(file) == data
        assert shelf.read(file, 10, 20) == data[10:20]
        assert shelf.again(file) == file
        with shelf.parquet(file) as parquet:
            assert parquet.metadata.num_rows == block.name.rows
        assert pickle.loads(pickle.dumps(shelf)).at(file.path).size == file.size
        assert shelf.stream(file).read() == data
    for deep in (False, True):
        found = survey(ObjectExaminer(shelf, None), "ORDERS", 100, deep=deep)
        assert (found.totals.objects, found.totals.messages) == (4, 6)
        assert (len(found.quarantined), len(found.sequences)) == (1, 6)
        assert (found.unusable.damaged.paths, found.unusable.foreign.paths) == ([], [])


def test_a_message_that_leaves_the_quarantine_while_it_is_listed_is_found_in_the_archive(simulated: Place) -> None:
    before, after = encoded([(9, 9)], quarantine=True), encoded([(9, 9)], key="eu")
    store = simulated.open()
    store.put(before.name, before.data)
    listing = ArchiveFiles(simulated.url, simulated.options).files("ORDERS")
    assert next(listing).name == before.name
    store.put(after.name, after.data)
    assert [file.name for file in listing] == [after.name]


def test_what_is_gone_is_said_to_be(place: Place) -> None:
    store = place.open()
    for block in BLOCKS[:2]:
        store.put(block.name, block.data)
    shelf = ArchiveFiles(place.url, place.options)
    file = next(iter(shelf.files("ORDERS")))
    absent = type(file)(path=f"{file.path}x", place=f"{file.place}x", size=file.size, name=file.name)
    for ask in (shelf.read, shelf.again, shelf.stream, lambda file: shelf.parquet(file).__enter__()):
        with pytest.raises(VanishedError, match="is gone"):
            ask(absent)


@pytest.mark.parametrize("driver", ["fsspec"], indirect=True)
@pytest.mark.parametrize("place", ["simulated", "moto", "real_s3", "azure"], indirect=True)
def test_what_was_stored_again_is_not_removed(place: Place) -> None:
    store, shelf = place.open(), ArchiveFiles(place.url, place.options)
    assert isinstance(store, ObjectStore)
    store.write_note("S/note", b"first")
    looked_at = shelf.at("S/note")
    store.write_note("S/note", b"again")
    with pytest.raises(VanishedError, match="was stored again"):
        shelf.remove(looked_at)
    assert place.objects() == {"S/note": b"again"}
    shelf.remove(shelf.again(looked_at))
    assert place.objects() == {}


ROWS, GROUPS = 60_000, 3


def test_neighbouring_columns_of_a_row_group_are_one_request_and_others_are_not_fetched(
    simulated: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    random, interval = np.random.default_rng(0), {f"{layout.METADATA_PREFIX}interval": "3600"}
    columns = {
        layout.STREAM: ["ORDERS"] * ROWS,
        layout.SEQ: np.arange(ROWS),
        layout.TIMESTAMP: pa.array(np.arange(ROWS), pa.timestamp("us", "UTC")),
        layout.NANOS: pa.array(np.zeros(ROWS), pa.int16()),
        **{f"c{number}": random.random(ROWS) for number in range(10)},
        layout.PAYLOAD: pa.array([random.bytes(300) for _ in range(ROWS)], pa.binary()),
        **{f"d{number}": random.random(ROWS) for number in range(2)},
        layout.KEY: ["eu"] * ROWS,
    }
    table, sink = pa.table(columns, metadata=interval), pa.BufferOutputStream()
    write_parquet(table, sink, row_group_size=ROWS // GROUPS)
    name = ObjectName(stream="ORDERS", key="eu", bucket=0, first_seq=0, last_seq=ROWS - 1, rows=ROWS, digest="0" * 16)
    simulated.open().put(name, data := sink.getvalue())
    assert data.size > SMALL
    read, requests = ArchiveFiles.read, list[int]()

    def counted(*arguments: Any) -> bytes:
        requests.append(len(fetched := read(*arguments)))
        return fetched

    monkeypatch.setattr(ArchiveFiles, "read", counted)

    def asked(*names: str) -> int:
        requests.clear()
        archive = read_archive(simulated.url, "ORDERS", columns=[layout.SEQ, *names])
        assert archive.read_all().equals(table.select([layout.SEQ, *names]))
        assert sum(requests) < data.size / 5
        return len(requests)

    without = asked()
    assert asked(*(f"c{number}" for number in range(4))) == without
    assert asked("d0", "d1") == without + GROUPS, "on the other side of the payloads"
