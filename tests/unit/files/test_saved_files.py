"""Files of an object store, given back from an archive that was written by hand."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from jetcapture_py.errors import JetcaptureError
from jetcapture_py.files import list_files, reading, save_file
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
        save_file(str(root), "files", NAME, directory / "mine")
        assert (directory / ".mine.partial").read_text() == "precious"
        assert (directory / "mine").read_bytes() == DATA

    def test_no_link_is_followed(self, root: Path, directory: Path) -> None:
        victim = directory / "victim"
        victim.write_text("precious")
        (directory / ".old.txt.partial").symlink_to(victim)
        save_file(str(root), "files", NAME, directory / "old.txt")
        assert victim.read_text() == "precious"
        assert not (directory / "old.txt").is_symlink()

    def test_two_at_the_same_time_do_not_share_one(
        self, root: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store_file(root, "other", b"something else", seq=3)
        target, copy = directory / "target", reading._copy
        others = [lambda: save_file(str(root), "files", "other", target)]

        def copy_after_the_other(*arguments: object) -> None:
            if others:
                others.pop()()
                assert target.read_bytes() == b"something else"
            copy(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(reading, "_copy", copy_after_the_other)
        save_file(str(root), "files", NAME, target)
        assert target.read_bytes() == DATA
        assert [path.name for path in directory.iterdir()] == ["target"]

    def test_the_mode_follows_the_umask(self, root: Path, directory: Path) -> None:
        before = os.umask(0o027)
        try:
            save_file(str(root), "files", NAME, directory / NAME)
        finally:
            os.umask(before)
        assert stat.S_IMODE((directory / NAME).stat().st_mode) == 0o640

    def test_none_is_left_after_a_failure(self, root: Path, directory: Path) -> None:
        store_file(root, "damaged", DATA, seq=3, digest="SHA-256=AAAA")
        with pytest.raises(JetcaptureError, match="do not have the SHA-256 of the metadata"):
            save_file(str(root), "files", "damaged", directory / "damaged")
        assert not list(directory.iterdir())


class TestRecordedConfigurations:
    @pytest.mark.parametrize("name", [".20260501T110000Z.json.0123.tmp", ".hidden.json", "notes.txt"])
    def test_other_files_beside_them_do_not_matter(self, root: Path, name: str) -> None:
        path = record_config(root, "2026-05-01T11:00:00.123456789Z")
        (path.parent / name).write_bytes(b"")
        assert [each.name for each in list_files(str(root), "files")] == [NAME]

    @pytest.mark.parametrize("data", [b"", b'{"stream": "OBJ_files", "stream_created": "soon", "config": {}}'])
    def test_a_damaged_one_is_named(self, root: Path, data: bytes) -> None:
        record_config(root, "2026-05-01T11:00:00Z").write_bytes(data)
        with pytest.raises(JetcaptureError, match=r"^_streams/OBJ_files/20260501T110000Z\.json: .") as caught:
            list_files(str(root), "files")
        assert "\n" not in str(caught.value)


class TestDigests:
    @pytest.mark.parametrize("digest", ["", None])
    def test_contents_that_cannot_be_checked_are_refused(self, root: Path, directory: Path, digest: str | None) -> None:
        store_file(root, "unchecked", DATA, seq=3, digest=digest)
        assert "unchecked" in [each.name for each in list_files(str(root), "files")]
        with pytest.raises(JetcaptureError, match=r'^"unchecked": its metadata has no digest$'):
            save_file(str(root), "files", "unchecked", directory / "unchecked")
        assert not list(directory.iterdir())
