"""Files of an object store, given back from an archive that was written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from jetcapture_py.errors import JetcaptureError
from jetcapture_py.files import list_files, read_file, save_file
from tests.support.object_stores import record_config, store_file

NAME, DATA = "old.txt", b"contents"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    found = tmp_path / "archive"
    store_file(found, NAME, DATA, seq=1)
    return found


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


class TestTemporaryFiles:
    def test_no_file_of_the_user_is_overwritten_or_removed(self, root: Path, directory: Path) -> None:
        (directory / ".mine.partial").write_text("precious")
        save_file(str(root), "files", NAME, str(directory / "mine"))
        assert (directory / ".mine.partial").read_text() == "precious"
        assert (directory / "mine").read_bytes() == DATA

    def test_no_link_is_followed(self, root: Path, directory: Path) -> None:
        victim = directory / "victim"
        victim.write_text("precious")
        (directory / ".old.txt.partial").symlink_to(victim)
        save_file(str(root), "files", NAME, directory / "old.txt")
        assert victim.read_text() == "precious"
        assert not (directory / "old.txt").is_symlink()

    def test_none_is_left_after_a_failure(self, root: Path, directory: Path) -> None:
        store_file(root, "damaged", DATA, seq=3, digest="SHA-256=AAAA")
        with pytest.raises(JetcaptureError, match="do not have the SHA-256 of the metadata"):
            save_file(str(root), "files", "damaged", directory / "damaged")
        assert not list(directory.iterdir())


class TestRecordedConfigurations:
    def test_a_damaged_one_is_named(self, root: Path) -> None:
        for data in (b"", b'{"stream": "OBJ_files", "stream_created": "soon", "config": {}}'):
            record_config(root, "2026-05-01T11:00:00Z").write_bytes(data)
            damaged = r"^_streams/OBJ_files/20260501T110000Z\.json is damaged: [^\n]+$"
            with pytest.raises(JetcaptureError, match=damaged):
                list_files(str(root), "files")


def test_contents_that_cannot_be_checked_are_refused(root: Path, directory: Path) -> None:
    for seq, name, digest in ((3, "empty", ""), (6, "missing", None)):
        store_file(root, name, DATA, seq=seq, digest=digest)
        assert name in [file.name for file in list_files(str(root), "files")]
        with pytest.raises(JetcaptureError, match=f'^"{name}": its metadata has no digest$'):
            save_file(str(root), "files", name, directory / name)
    assert not list(directory.iterdir())


class TestIncarnations:
    """The archive has a file from 11:00:00, and the configuration of a store from before."""

    @pytest.fixture(autouse=True)
    def _recorded(self, root: Path) -> None:
        record_config(root, "2026-05-01T10:00:00Z")

    def names(self, root: Path, as_of: str | None = None) -> list[str]:
        return [file.name for file in list_files(str(root), "files", as_of=as_of)]

    def test_a_store_that_was_created_again_and_is_empty_has_no_files(self, root: Path) -> None:
        record_config(root, "2026-05-01T11:00:30Z")
        assert self.names(root) == []
        assert self.names(root, "2026-05-01T11:00:29Z") == [NAME]
        with pytest.raises(JetcaptureError, match=r'object store files has no file "old\.txt" in the archive'):
            read_file(str(root), "files", NAME)

    def test_a_restored_store_and_a_mirror_have_the_earlier_files_as_well(self, root: Path) -> None:
        record_config(root, "2026-05-01T11:00:30Z", continues=True)
        assert self.names(root) == [NAME]
        store_file(root, "new", DATA, seq=3, second=60)
        assert self.names(root) == ["new", NAME]

    def test_a_restored_store_has_the_files_since_it_was_last_created_anew(self, root: Path) -> None:
        store_file(root, "older", DATA, seq=90, second=10)
        record_config(root, "2026-05-01T11:00:30Z")
        store_file(root, "backed up", DATA, seq=1, second=40)
        record_config(root, "2026-05-01T11:00:50Z", continues=True)
        assert self.names(root) == ["backed up"]
        store_file(root, "new", DATA, seq=3, second=60)
        assert self.names(root) == ["backed up", "new"]
