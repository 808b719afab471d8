"""A local archive's root that was there at the start and is gone is an outage, whatever stands in its place."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jetcapture_py.archive.layout import MARKER
from jetcapture_py.errors import PermanentStoreError, StoreError
from jetcapture_py.store import LocalStore
from jetcapture_py.store import local as store_module
from tests.integration.store.test_store import name, put
from tests.support.mounts import Volume

FIRST, SECOND = name(first=1), name(first=2)


def archive_id(root: Path) -> str:
    found = json.loads((root / MARKER).read_bytes())
    assert found["format"] == 1
    return str(found["id"])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "volume" / "archive"


@pytest.fixture
def store(root: Path) -> LocalStore:
    """A store that has been opened, with one object in it."""
    found = LocalStore(str(root))
    found.probe()
    put(found, FIRST, b"first")
    return found


# ------------------------------------------------------------------ starting


def test_a_missing_root_is_created_and_marked(root: Path) -> None:
    store = LocalStore(str(root))
    store.probe()
    assert store.new
    assert len(archive_id(root)) == 32
    assert not [path for path in root.iterdir() if path.name not in (MARKER, "_probe")]


def test_a_second_start_keeps_the_marker(root: Path, store: LocalStore) -> None:
    before = archive_id(root)
    again = LocalStore(str(root))
    again.probe()
    assert not again.new
    assert archive_id(root) == before


def test_an_archive_from_before_there_were_markers_is_marked_and_not_new(root: Path, store: LocalStore) -> None:
    (root / MARKER).unlink()
    again = LocalStore(str(root))
    put(again, SECOND, b"second")
    assert not again.new
    assert archive_id(root)


def test_an_empty_volume_is_a_new_archive(root: Path) -> None:
    (root / "lost+found").mkdir(parents=True)
    store = LocalStore(str(root))
    store.probe()
    assert store.new


def test_replicas_that_start_together_agree_on_one_marker(root: Path) -> None:
    for round_ in range(20):
        stores = [LocalStore(f"{root}-{round_}") for _ in range(6)]
        with ThreadPoolExecutor(len(stores)) as threads:
            for _ in threads.map(lambda each: each.probe(), stores):
                pass
        for number, each in enumerate(stores, 1):
            put(each, name(first=number), b"content")
        left = {path.name for path in Path(f"{root}-{round_}").iterdir()}
        assert left == {MARKER, "_probe", "S"}


def test_a_file_system_without_hard_links_is_marked_too(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    put(LocalStore(str(root)), FIRST, b"first")
    assert archive_id(root)
    put(LocalStore(str(root)), SECOND, b"second")


def test_a_marker_that_cannot_be_read_is_an_error_that_names_it(root: Path) -> None:
    root.mkdir(parents=True)
    (root / MARKER).write_bytes(b"")
    with pytest.raises(StoreError, match=f"{MARKER} is damaged"):
        LocalStore(str(root)).probe()


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(30, "Read-only file system")])
def test_a_root_that_cannot_be_marked_is_a_permanent_error(
    root: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    root.mkdir(parents=True)
    refused(monkeypatch, error)
    with pytest.raises(PermanentStoreError, match=str(error.strerror)):
        LocalStore(str(root)).probe()


def refused(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    """From now on no marker can be written."""
    real = os.open

    def refuse(path: Any, *arguments: Any, **named: Any) -> int:
        if MARKER in str(path) and arguments[0] & os.O_CREAT:
            raise error
        return real(path, *arguments, **named)

    monkeypatch.setattr(os, "open", refuse)


def test_reading_a_note_creates_nothing(root: Path) -> None:
    assert LocalStore(str(root)).read_note("_watermark/S.json") is None
    assert not root.exists()


# ------------------------------------------------------------------ losing the root, and getting it back


def removed(root: Path) -> None:
    shutil.rmtree(root)


def renamed(root: Path) -> None:
    root.rename(root.with_name("elsewhere"))


def emptied(root: Path) -> None:
    """As after an unmount, and with the same inode where the file system gives it again."""
    shutil.rmtree(root)
    root.mkdir()


def replaced(root: Path) -> None:
    renamed(root)
    root.mkdir()


def another_archive(root: Path) -> None:
    renamed(root)
    put(LocalStore(str(root)), SECOND, b"of another archive")


def relinked(root: Path) -> None:
    renamed(root)
    other = root.with_name("other")
    other.mkdir()
    root.symlink_to(other)


def a_file(root: Path) -> None:
    renamed(root)
    root.touch()


LOSSES = [removed, emptied, replaced, another_archive, relinked, a_file]


@pytest.mark.parametrize("lose", LOSSES)
def test_nothing_is_stored_while_the_root_is_not_the_archive(
    root: Path, store: LocalStore, lose: Callable[[Path], None]
) -> None:
    lose(root)
    before = everything(root.parent.parent)
    with pytest.raises(StoreError, match=rf"cannot write .*{root}"):
        put(store, SECOND, b"second")
    with pytest.raises(StoreError):
        store.probe()
    with pytest.raises(StoreError):
        store.write_note("_watermark/S.json", b"{}")
    with pytest.raises(StoreError):
        store.read_note("_watermark/S.json")
    assert everything(root.parent.parent) == before


def everything(top: Path) -> set[str]:
    return {str(path) for path in top.rglob("*")}


@pytest.mark.parametrize("lose", [replaced, relinked])
def test_once_the_root_is_back_objects_are_stored_again(
    root: Path, store: LocalStore, lose: Callable[[Path], None]
) -> None:
    lose(root)
    with pytest.raises(StoreError):
        put(store, SECOND, b"second")
    if root.is_symlink():
        root.unlink()
    else:
        root.rmdir()
    root.with_name("elsewhere").rename(root)
    put(store, SECOND, b"second")
    assert (root / SECOND.path).read_bytes() == b"second"


def test_a_copy_of_the_archive_in_its_place_is_the_archive(root: Path, store: LocalStore) -> None:
    shutil.copytree(root, root.with_name("copy"))
    removed(root)
    root.with_name("copy").rename(root)
    put(store, SECOND, b"second")
    assert (root / FIRST.path).read_bytes() == b"first"


def test_a_marker_that_was_removed_is_an_outage_until_it_is_back(root: Path, store: LocalStore) -> None:
    content = (root / MARKER).read_bytes()
    (root / MARKER).unlink()
    with pytest.raises(StoreError, match=f"no {MARKER}") as caught:
        put(store, SECOND, b"second")
    assert not isinstance(caught.value, PermanentStoreError)
    (root / MARKER).write_bytes(content)
    put(store, SECOND, b"second")


def test_an_object_that_is_written_while_the_root_is_replaced_lands_in_the_archive_or_fails(
    root: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the worst moment: the root has been looked at, and nothing is written yet."""
    real = store_module.write_durably

    def late(*arguments: Any, **named: Any) -> None:
        if not root.with_name("elsewhere").exists():
            replaced(root)
        real(*arguments, **named)

    monkeypatch.setattr(store_module, "write_durably", late)
    put(store, SECOND, b"second")
    assert (root.with_name("elsewhere") / SECOND.path).read_bytes() == b"second"
    assert list(root.iterdir()) == []


def test_of_a_root_behind_a_link_the_directory_counts(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "one")
    store = LocalStore(str(tmp_path / "link"))
    put(store, FIRST, b"first")
    (tmp_path / "link").unlink()
    with pytest.raises(StoreError):
        put(store, SECOND, b"second")
    (tmp_path / "one").rename(tmp_path / "two")
    (tmp_path / "link").symlink_to(tmp_path / "two")
    put(store, SECOND, b"second")


# ------------------------------------------------------------------ a root for every key


def test_with_the_key_in_the_address_the_root_is_what_comes_before_it(tmp_path: Path) -> None:
    store = LocalStore(f"{tmp_path}/volume/for-{{key}}/nats")
    put(store, name("a"), b"a")
    assert archive_id(tmp_path / "volume")
    put(store, name("b"), b"b")
    replaced(tmp_path / "volume")
    for key in ("a", "c"):
        with pytest.raises(StoreError, match=str(tmp_path / "volume")):
            put(store, name(key), b"again")
    assert list((tmp_path / "volume").iterdir()) == []


def test_no_key_can_take_the_markers_place(tmp_path: Path) -> None:
    store = LocalStore(f"{tmp_path}/volume/{{key}}")
    put(store, name(MARKER), b"hostile")
    put(store, name("b"), b"b")
    assert archive_id(tmp_path / "volume")


def test_where_only_the_keys_directories_are_writable_the_root_is_known_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    refused(monkeypatch, PermissionError(13, "Permission denied"))
    store = LocalStore(f"{volume}/{{key}}")
    put(store, name("a"), b"a")
    put(store, name("b"), b"b")
    replaced(volume)
    with pytest.raises(StoreError):
        put(store, name("a", first=2), b"again")
    assert list(volume.iterdir()) == []


# ------------------------------------------------------------------ real mounts


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Volume]:
    found = Volume(tmp_path)
    yield found
    found.close()


@pytest.mark.parametrize("below", ["", "archive"])
def test_an_unmounted_volume_is_an_outage(volume: Volume, below: str) -> None:
    store = LocalStore(str(volume.point / below))
    put(store, FIRST, b"first")
    volume.unmount()
    with pytest.raises(StoreError, match="is it mounted"):
        put(store, SECOND, b"second")
    assert list(volume.point.iterdir()) == []
    volume.mount()
    put(store, SECOND, b"second")
    assert (volume.real / below / FIRST.path).read_bytes() == b"first"
    assert (volume.real / below / SECOND.path).read_bytes() == b"second"
