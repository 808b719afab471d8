"""What every store must do, and what only one kind of it can show."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import stat
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fsspec.registry import _registry

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import MARKER, ObjectName
from jetcapture_py.config.model import StoreConfig
from jetcapture_py.errors import ConfigError, PermanentStoreError, StoreError
from jetcapture_py.store import LocalStore, NoteStore, Store, change_note, configured_store, open_store
from jetcapture_py.store import root as archive_root
from jetcapture_py.store.archive import ArchiveFiles
from tests.integration.store.conftest import LocalPlace, Place, S3Place


class Own:
    def __init__(self, url: str, options: Any) -> None:
        self.given = (url, dict(options))

    def put(self, name: ObjectName, data: pa.Buffer) -> str:
        return name.path

    def probe(self) -> None:
        pass


def failing(url: str, options: Any) -> Store:
    raise SystemExit("no\nway")


def no_store(url: str, options: Any) -> dict[str, Any]:
    return {}


KEYS = [
    *(None, "a", "a/b", "..", ".", "../../etc", " ", "a b+c", "%2F", "100%", "#?&=:;@!$,'()*", "größe", "日本"),
    *("e\u0301", "\x00\n\t\x7f", "\u2028", "007", "key=x", "{key}", "~", "\\", '"', layout.DEFAULT_PARTITION),
    *("x" * layout.MAX_KEY_BYTES, "日" * (layout.MAX_KEY_BYTES // 3)),
]


def name(key: str | None = "k", first: int = 1) -> ObjectName:
    digest = f"{first:016x}"
    return ObjectName(stream="S", key=key, bucket=1_700_000_100, first_seq=first, last_seq=9, rows=9, digest=digest)


def put(store: Store, to: ObjectName, data: bytes) -> str:
    return store.put(to, pa.py_buffer(data))


# ------------------------------------------------------------------ every store


def test_an_object_is_stored_once_and_byte_for_byte_where_it_is_said_to_be(place: Place) -> None:
    data = bytes(range(256)) * 33
    store = place.open()
    for probed in (store, place.open("/{key}")):
        probed.probe()
    assert place.objects() == {}
    location = store.put(name(), pa.py_buffer(b"before" + data + b"after").slice(6, len(data)))
    assert location == put(store, name(), b"another") == put(place.open(), name(), b"another")
    assert location == f"{place.url}/{name().path}".removeprefix("file://")
    assert place.objects() == {name().path: data}


def test_every_key_can_be_stored_and_none_leaves_its_directory(place: Place) -> None:
    store = place.open()
    for key in KEYS:
        put(store, name(key), repr(key).encode())
    found = place.objects()
    parsed = {path: layout.parse_path(path) for path in found}
    assert {each.key: found[path] for path, each in parsed.items() if each} == {key: repr(key).encode() for key in KEYS}
    assert len(found) == len(KEYS)


def test_the_same_object_put_by_several_threads_is_one_whole_object(place: Place) -> None:
    data = random.Random(1).randbytes(1 << 20)
    store = place.open()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: put(store, name(), data), range(8)))
    assert place.objects() == {name().path: data}


def test_notes_are_listed_and_read_as_another_replica_wrote_them_last(place: Place) -> None:
    store, other, files = place.open(), place.open(), ArchiveFiles(place.url, place.options)
    assert isinstance(store, NoteStore)
    assert (store.list_notes("_erased/S"), store.read_note("_erased/S/a.json")) == ([], None)
    assert (files.notes("_erased/S"), files.read_note("_erased/S/a.json")) == ([], None)
    for path in ("_erased/S/b.json", "_erased/S/a.json", "_erased/S2/c.json"):
        for content in (b"first", b"second, longer", b"3"):
            other.write_note(path, content)
            assert store.read_note(path) == files.read_note(path) == content
    assert store.list_notes("_erased/S") == files.notes("_erased/S") == ["_erased/S/a.json", "_erased/S/b.json"]


def add(store: NoteStore, content: bytes) -> None:
    change_note(store, "_watermark/S.json", lambda there: (there or b"") + content)


def test_what_another_replica_writes_while_a_note_is_changed_is_not_lost(place: Place) -> None:
    one, other = place.open(), place.open()
    assert isinstance(one, NoteStore)
    assert isinstance(other, NoteStore)
    others: list[threading.Thread] = []

    def overtaken(data: bytes | None) -> bytes:
        """Each time that it is called, another replica writes, or waits until this one has written."""
        if len(others) < 3:
            others.append(threading.Thread(target=add, args=(other, b"[other %d]" % len(others))))
            others[-1].start()
            others[-1].join(1)
        return (data or b"") + b"[own]"

    change_note(one, "_watermark/S.json", overtaken)
    change_note(one, "_watermark/S.json", overtaken)
    for thread in others:
        thread.join(300)
    content = one.read_note("_watermark/S.json")
    assert content is not None
    assert content.count(b"[own]") == 2
    assert [content.count(b"[other %d]" % number) for number in range(len(others))] == [1] * len(others)


def test_a_note_that_needs_no_change_is_not_written(simulated: Place) -> None:
    change_note(simulated.open(), "_watermark/S.json", lambda _: None)
    assert simulated.objects() == {}


def test_a_local_note_that_is_locked_is_an_error_that_may_pass_and_no_other_waits_for_it(
    local: LocalPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_root, "LOCK_TIMEOUT", 0.1)
    store, other = local.open(), local.open()
    assert isinstance(store, NoteStore)
    assert isinstance(other, NoteStore)

    def meanwhile(there: bytes | None) -> bytes:
        reason = r"_watermark/S\.json: another capture or command has kept it locked for "
        with pytest.raises(StoreError, match=reason) as caught:
            change_note(other, "_watermark/S.json", lambda _: b"other")
        assert not isinstance(caught.value, PermanentStoreError)
        for number in range(400):  # the streams of an archive
            change_note(other, f"_watermark/S{number}.json", lambda _: b"other")
        return b"own"

    change_note(store, "_watermark/S.json", meanwhile)
    change_note(other, "_watermark/S.json", lambda there: (there or b"") + b", other")
    assert store.read_note("_watermark/S.json") == b"own, other"


def test_a_file_system_without_locks_keeps_notes_all_the_same(
    local: LocalPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    store = local.open()
    assert isinstance(store, NoteStore)
    change_note(store, "_watermark/S.json", lambda _: b"content")
    assert store.read_note("_watermark/S.json") == b"content"


def test_a_note_that_this_user_cannot_lock_is_not_changed(local: LocalPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    store, opened = local.open(), os.open
    assert isinstance(store, NoteStore)
    change_note(store, "_watermark/S.json", lambda _: b"content")

    def refuse(path: str, flags: int, *args: Any, **options: Any) -> int:
        if path == layout.MARKER and flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermanentStoreError, match=rf"this user cannot lock _watermark/S\.json: make {layout.MARKER} w"):
        change_note(store, "_watermark/S.json", lambda _: b"changed")
    assert store.read_note("_watermark/S.json") == b"content"


# ------------------------------------------------------------------ a directory


def test_a_directory_may_be_named_with_or_without_a_scheme(tmp_path: Path) -> None:
    for number, prefix in enumerate(("", "file://", "local://")):
        location = put(open_store(f"{prefix}{tmp_path}/{number}", {}), name(), b"content")
        assert location == str(tmp_path / str(number) / name().path)
        assert Path(location).read_bytes() == b"content"
    assert {ArchiveFiles(url, {}).url for url in ("/a/b", "file:/a/b", "file:///a/b")} == {"file:///a/b"}


def test_nothing_is_visible_before_it_is_whole_and_synced(local: LocalPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[int, list[str], list[bytes]]] = []
    fsync = os.fsync

    def watch(handle: int) -> None:
        fsync(handle)
        found = local.objects() if local.root.exists() else {}
        synced.append((os.fstat(handle).st_ino, [Path(path).name for path in found], list(found.values())))

    store = local.open()
    store.probe()
    (local.root / "_probe").rmdir()
    monkeypatch.setattr(os, "fsync", watch)
    location = Path(put(store, name(), b"content"))
    monkeypatch.undo()
    *directories, (file, during, written), (last, after, _) = synced
    assert file == location.stat().st_ino
    assert written == [b"content"]
    (hidden,) = during
    assert hidden.startswith(".")
    assert last == location.parent.stat().st_ino
    assert after == [location.name]
    made = [parent for parent in location.parents if parent.is_relative_to(local.root)][1:]
    assert {inode for inode, _, _ in directories} == {directory.stat().st_ino for directory in made}


def test_what_can_never_be_written_is_a_permanent_error_of_one_line_and_leaves_no_hidden_file(
    local: LocalPlace,
) -> None:
    (local.root / name("a").path / "inner").mkdir(parents=True)
    (local.root / "S" / "key=b").write_bytes(b"a file in the place of a directory")
    before = local.objects()
    for key, reason in (("a", None), ("b", r"cannot write .*/S/key=b/date="), ("x" * 300, None)):
        with pytest.raises(PermanentStoreError, match=reason) as caught:
            put(local.open(), name(key), b"content")
        assert "\n" not in str(caught.value)
    assert local.objects() == before


@pytest.mark.parametrize(
    ("code", "reason"),
    [(errno.EIO, "Input/output error"), (errno.ENOSPC, "the disk is full"), (errno.EFBIG, "File too large")],
)
def test_a_failure_leaves_no_hidden_file_and_may_pass(
    local: LocalPlace, monkeypatch: pytest.MonkeyPatch, code: int, reason: str
) -> None:
    store = local.open()
    put(store, name(first=1), b"before")

    def fail(handle: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as failing:
        failing.setattr(os, "fsync", fail)
        with pytest.raises(StoreError, match=reason) as caught:
            put(store, name(first=2), b"content")
    assert not isinstance(caught.value, PermanentStoreError)
    assert list(local.objects()) == [name(first=1).path]
    put(store, name(first=2), b"content")
    assert local.objects() == {name(first=1).path: b"before", name(first=2).path: b"content"}


def test_a_file_system_that_does_not_sync_directories_is_no_failure(
    local: LocalPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def of_files(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", of_files)
    put(local.open(), name(), b"content")
    assert local.objects() == {name().path: b"content"}


@pytest.mark.parametrize(("step", "code"), [("try_out", errno.ENOSYS), ("probe", errno.EOPNOTSUPP)])
def test_a_file_system_without_rename_is_refused_and_nothing_is_left(
    local: LocalPlace, monkeypatch: pytest.MonkeyPatch, step: str, code: int
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    store = local.open()
    assert isinstance(store, LocalStore)
    monkeypatch.setattr(os, "replace", refuse)
    reason = "its file system cannot rename files; if it is an object store, name that in store.url instead"
    with pytest.raises(PermanentStoreError, match=reason):  # at the start of `run`, and by `check`
        getattr(store, step)()
    assert not local.root.exists() or local.objects() == {}


@pytest.mark.parametrize("refused", [0, errno.EPERM], ids=["links", "no links"])
@pytest.mark.parametrize(("before", "after"), [(b"first", b"first"), (b"", b"second")], ids=["whole", "empty"])
def test_a_put_replaces_no_object_but_an_empty_one(
    local: LocalPlace, monkeypatch: pytest.MonkeyPatch, refused: int, before: bytes, after: bytes
) -> None:
    store = local.open()
    put(store, name(), before)

    def no_links(*_: object, **__: object) -> None:
        raise OSError(refused, "not permitted")

    if refused:
        monkeypatch.setattr(os, "link", no_links)
    put(store, name(), b"second")
    put(store, name(first=2), b"new")
    assert local.objects() == {name().path: after, name(first=2).path: b"new"}


def test_a_directory_that_was_removed_meanwhile_is_made_again(local: LocalPlace) -> None:
    store = local.open()
    location = Path(put(store, name(), b"content"))
    location.unlink()
    location.parent.rmdir()
    put(store, name(), b"again")
    assert local.objects() == {name().path: b"again"}


@pytest.mark.parametrize("kind", ["local", "simulated_local"])
def test_what_a_killed_process_left_is_swept_and_what_another_one_writes_is_not(
    request: pytest.FixtureRequest, kind: str
) -> None:
    place, directory = request.getfixturevalue(kind), name().directory
    for file, age in ((".a.parquet.1.tmp", 3700), (".b.parquet.2.tmp", 3500), ("notes.txt", 99_999)):
        place.leave(f"{directory}/{file}", age)
    put(place.open(), name(), b"content")
    assert place.objects().keys() == {f"{directory}/.b.parquet.2.tmp", f"{directory}/notes.txt", name().path}


# ------------------------------------------------------------------ S3


def test_a_missing_bucket_is_a_permanent_error(s3: S3Place) -> None:
    store = open_store("s3://no-such-bucket/archive", s3.options)
    for attempt in (store.probe, lambda: put(store, name(), b"content")):
        with pytest.raises(PermanentStoreError, match=r"^cannot write s3://no-such-bucket/archive/") as caught:
            attempt()
        assert "\n" not in str(caught.value)


# ------------------------------------------------------------------ opening


def test_a_store_of_the_users_own_is_made_of_url_and_options_and_another_is_a_wrong_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for package in ("s3fs", "adlfs"):
        monkeypatch.setitem(sys.modules, package, None)
    for scheme in ("s3a", "abfss"):
        monkeypatch.delitem(_registry, scheme, raising=False)

    def of(type_: str, url: str) -> Store:
        if not type_:
            return open_store(url, {})
        return configured_store(StoreConfig(type=f"{__name__}:{type_}", url=url, options={"a": 1}))

    own = of("Own", "own://there")
    assert isinstance(own, Own)
    assert own.given == ("own://there", {"a": 1})
    for type_, url, reason in (
        ("nothing", "x://", "store.type: cannot import {}: AttributeError: module '.*' has no attribute 'nothing'"),
        ("failing", "x://", "store.type: {} cannot be created: SystemExit: no way"),
        ("no_store", "x://", "store.type: {} is not a store: it has no method put"),
        ("", "nope://bucket", "store.url: nope:// is not available here"),
        ("", "s3a://bucket/path", r"store.url: s3a:// is not available here; .*pip install 'jetcapture\[s3\]'"),
        ("", "abfss://bucket/x", r"store.url: abfss:// is not available here; .*pip install 'jetcapture\[azure\]'"),
    ):
        with pytest.raises(ConfigError, match=f"^{reason.format(f'{__name__}:{type_}')}"):
            of(type_, url)


NAME = ObjectName(stream="ORDERS", key="eu", bucket=0, first_seq=1, last_seq=1, rows=1, digest="0" * 16)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("mask", [0o027, 0o000])
def test_modes_follow_the_umask_and_are_never_writable_for_everybody(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        store = LocalStore(str(tmp_path / "archive"))
        store.probe()
        store.put(NAME, pa.py_buffer(b"x"))
        store.write_note("_watermark/ORDERS.json", b"{}")
        store.write_note("_watermark/ORDERS.json", b"{ }")
    found = list((tmp_path / "archive").rglob("*"))
    assert {path.name for path in found if path.is_file()} == {MARKER, Path(NAME.path).name, "ORDERS.json"}
    for path in (tmp_path / "archive", *found):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o664 if path.is_file() else 0o775) & ~mask, path
        assert not mode & stat.S_IWOTH


def test_a_place_where_no_directory_can_be_made_is_an_error_and_no_endless_attempt() -> None:
    with pytest.raises(StoreError, match="No such file or directory"):
        LocalStore("/proc/jetcapture/archive").probe()
