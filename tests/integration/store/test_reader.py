"""What every store gives back: its objects, listed, read in parts, and proven."""

from __future__ import annotations

import pickle

import pytest

from jetcapture_py.errors import VanishedError
from jetcapture_py.store.archive import ArchiveFiles
from jetcapture_py.verify.examine import ObjectExaminer
from jetcapture_py.verify.scan import survey
from tests.integration.store.conftest import Place
from tests.support.archives import encoded

BLOCKS = (
    encoded([(1, 5), (2, 6), (4, 7)], key="eu"),
    encoded([(3, 6)], key="a/b"),
    encoded([(5, 6)], key=None),
    encoded([(9, 9)], quarantine=True),
)


OTHER = encoded([(1, 5)], stream="ORDERS2")


def test_what_was_stored_is_listed_read_and_proven(place: Place) -> None:
    proven(place, "/for-{key}/nats")


@pytest.mark.parametrize("suffix", ["", "/{key}"])
def test_objects_are_found_wherever_the_key_is_in_the_address(simulated: Place, suffix: str) -> None:
    proven(simulated, suffix)


def proven(place: Place, suffix: str) -> None:
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
    with pytest.raises(VanishedError):
        shelf.read(absent)
    with pytest.raises(VanishedError):
        shelf.again(absent)
    with pytest.raises(VanishedError, match="is gone"), shelf.parquet(absent):
        pass
    with pytest.raises(VanishedError):
        shelf.stream(absent)
