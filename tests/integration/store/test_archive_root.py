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


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "volume" / "archive"


@pytest.fixture
def store(root: Path) -> LocalStore:
    found = LocalStore(str(root))
    found.probe()
    put(found, FIRST, b"first")
    return found


# ------------------------------------------------------------------ starting


def archive_id(root: Path) -> str:
    found = json.loads((root / MARKER).read_bytes())
    assert found["format"] == 1
    assert len(found["id"]) == 32
    return str(found["id"])


def opened(root: Path) -> LocalStore:
    store = LocalStore(str(root))
    store.probe()
    return store


def refused(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    real = os.open

    def refuse(path: Any, *arguments: Any, **named: Any) -> int:
        if MARKER in str(path) and arguments[0] & os.O_CREAT:
            raise error
        return real(path, *arguments, **named)

    monkeypatch.setattr(os, "open", refuse)


def test_a_missing_or_empty_root_is_a_new_archive_and_is_marked_and_a_second_start_keeps_the_marker(
    tmp_path: Path,
) -> None:
    (tmp_path / "empty" / "lost+found").mkdir(parents=True)
    for root in (tmp_path / "missing", tmp_path / "empty"):
        assert LocalStore(str(root)).read_note("_watermark/S.json") is None
        assert not (root / MARKER).exists(), "reading a note creates nothing"
        assert opened(root).new
        before = archive_id(root)
        assert {path.name for path in root.iterdir()} <= {MARKER, "_probe", "lost+found"}
        put(opened(root), FIRST, b"first")
        assert archive_id(root) == before
        assert not opened(root).new
    (root / MARKER).unlink()  # as of an archive from before there were markers
    again = LocalStore(str(root))
    put(again, SECOND, b"second")
    assert not again.new
    assert archive_id(root)


def test_a_root_that_cannot_be_marked_is_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir(parents=True)
    (root / MARKER).write_bytes(b"")
    with pytest.raises(StoreError, match=f"{MARKER} is damaged"):
        opened(root)
    (root / MARKER).unlink()
    for error in (PermissionError(13, "Permission denied"), OSError(30, "Read-only file system")):
        with monkeypatch.context() as patch:
            refused(patch, error)
            with pytest.raises(PermanentStoreError, match=error.strerror):
                opened(root)


def test_replicas_that_start_together_agree_on_one_marker(root: Path) -> None:
    for round_ in range(20):
        stores = [LocalStore(f"{root}-{round_}") for _ in range(6)]
        with ThreadPoolExecutor(len(stores)) as threads:
            list(threads.map(LocalStore.probe, stores))
        for number, each in enumerate(stores, 1):
            put(each, name(first=number), b"content")
        assert {path.name for path in Path(f"{root}-{round_}").iterdir()} == {MARKER, "_probe", "S"}


def test_a_file_system_without_hard_links_is_marked_too(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    for name_ in (FIRST, SECOND):
        put(LocalStore(str(root)), name_, b"content")
    assert archive_id(root)


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


@pytest.mark.parametrize("lose", [removed, emptied, replaced, another_archive, relinked, a_file])
def test_nothing_is_stored_while_the_root_is_not_the_archive(
    root: Path, store: LocalStore, lose: Callable[[Path], None]
) -> None:
    lose(root)
    before = everything(root.parent.parent)
    with pytest.raises(StoreError, match=rf"cannot write .*{root}"):
        put(store, SECOND, b"second")
    for attempt in (store.probe, lambda: store.write_note("_watermark/S.json", b"{}"), lambda: store.read_note("_n")):
        with pytest.raises(StoreError):
            attempt()
    assert everything(root.parent.parent) == before
    if root.with_name("elsewhere").exists():
        is_back(root, store)


def everything(top: Path) -> set[str]:
    return {str(path) for path in top.rglob("*")}


def is_back(root: Path, store: LocalStore) -> None:
    with pytest.raises(StoreError):
        put(store, SECOND, b"second")
    root.unlink() if root.is_symlink() or root.is_file() else shutil.rmtree(root)
    root.with_name("elsewhere").rename(root)
    put(store, SECOND, b"second")
    assert (root / SECOND.path).read_bytes() == b"second"


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
