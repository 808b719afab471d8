"""Files of an object store, captured by the real daemon while it is in use, given back from the archive."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import io
import json
import shutil
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client
from nats.js.errors import NotFoundError

from jetcapture_py.archive import layout
from jetcapture_py.config.units import moment_of
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.files import ArchivedFile, list_files, read_file, save_file
from tests.support.archives import merge
from tests.support.commands import jetcapture
from tests.support.nats_server import NatsServer
from tests.support.running import Command, connection, settings, until

MEBIBYTE = 1 << 20


def noise(size: int, seed: int) -> bytes:
    """Bytes that look random and are always the same."""
    return hashlib.shake_128(seed.to_bytes(4, "big")).digest(size)


@dataclass
class Files:
    """The archive, what the stores held in the end, and at the revision `before`."""

    root: Path
    config: Path
    now: dict[str, bytes] = field(default_factory=dict)
    earlier: dict[str, bytes] = field(default_factory=dict)
    before: int = 0
    time: datetime = field(default_factory=lambda: moment_of(0))

    @property
    def url(self) -> str:
        return self.root.as_uri()


def meta(store: str, name: str, **info: Any) -> tuple[str, bytes, dict[str, str]]:
    """Metadata as clients publish it."""
    subject = f"$O.{store}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"
    return subject, json.dumps({"name": name, "bucket": store, **info}).encode(), {"Nats-Rollup": "sub"}


def link(bucket: str, name: str | None) -> dict[str, Any]:
    return {"nuid": f"link-{name}", "options": {"link": {"bucket": bucket, **({"name": name} if name else {})}}}


async def caught_up(client: Client, *stores: str) -> None:
    """Wait until everything is captured and stored: replaced chunks are removed from the stream."""

    async def stored() -> bool:
        for store in stores:
            try:
                consumer = await client.jetstream().consumer_info(f"OBJ_{store}", "archive")
            except NotFoundError:
                return False
            if consumer.num_pending or consumer.num_ack_pending:
                return False
        return True

    await until(stored, "everything is captured and stored")


async def use(url: str, found: Files) -> None:
    """Put, replace, delete, link and rename files."""
    async with connection(url) as client:
        stream = client.jetstream()
        files, other = [await stream.object_store(name) for name in ("files", "other")]
        first = {
            "empty": b"",
            "one": b"x",
            "dir/größe 5 MiB.bin": noise(5 * MEBIBYTE, 1),
            "exact": noise(2 * 128 * 1024, 2),
            "replaced": noise(3 * MEBIBYTE, 3),
            "emptied": noise(300_000, 4),
            "deleted": noise(1_000_000, 5),
            "old name": noise(200_000, 6),
            "again": b"first",
        }
        for name, data in first.items():
            await files.put(name, data)
        await other.put("target", noise(400_000, 7))
        await caught_up(client, "files", "other")
        found.earlier = dict(first)
        state = (await stream.stream_info("OBJ_files")).state
        found.before = state.last_seq
        found.time = datetime.now(moment_of(0).tzinfo)
        await files.put("replaced", noise(4 * MEBIBYTE, 8))
        await files.put("emptied", b"")
        await files.delete("deleted")
        await files.delete("again")
        await caught_up(client, "files")
        await files.put("again", b"second")
        renamed = await files.get_info("old name")
        new = {key: getattr(renamed, key) for key in ("nuid", "size", "chunks", "digest")}
        for subject, payload, headers in (
            meta("files", "new name", **new),
            meta("files", "link", **link("files", "replaced")),
            meta("files", "far link", **link("other", "target")),
            meta("files", "store link", **link("other", None)),
            meta("files", "dead link", **link("files", "deleted")),
            meta("files", "link a", **link("files", "link b")),
            meta("files", "link b", **link("files", "link a")),
            meta("files", "lost link", **link("elsewhere", "x")),
            ("$O.files.M.bm90IEpTT04", b"{", {}),
            meta("files", "md5", nuid="m", size=0, chunks=0, digest="MD5=xyz"),
        ):
            await stream.publish(subject, payload, headers=headers or None)
        await stream.purge_stream("OBJ_files", subject=meta("files", "old name")[0])
        await caught_up(client, "files", "other")
    found.now = {name: data for name, data in first.items() if name not in ("deleted", "old name")}
    found.now |= {"replaced": noise(4 * MEBIBYTE, 8), "emptied": b"", "again": b"second"}
    found.now |= {"new name": first["old name"], "link": found.now["replaced"], "far link": noise(400_000, 7)}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    place = tmp_path_factory.mktemp("files")
    found = Files(place / "archive", place / "files.yaml")
    with NatsServer(place / "nats") as server:

        async def create() -> None:
            async with connection(server.url) as client:
                for name in ("files", "other"):
                    await client.jetstream().create_object_store(name)

        asyncio.run(create())
        with contextlib.ExitStack() as stack:
            commands = []
            for name in ("files", "other"):
                capture = settings(server.url, found.root, block={"interval": "24h", "max_age": "200ms"})
                del capture["key"]  # the default of object stores
                capture["source"] = {"object_store": name, "consumer": "archive"}
                commands.append(stack.enter_context(Command(place, capture, name).start()))
            asyncio.run(use(server.url, found))
            for command in commands:
                command.drain()
    return found


def test_every_file_is_given_back_byte_for_byte_as_it_is_and_as_it_was(files: Files) -> None:
    assert {name: read_file(files.url, "files", name) for name in files.now} == files.now
    assert read_file(files.url, "other", "target") == noise(400_000, 7)
    for as_of in (files.before, files.time):
        assert {name: read_file(files.url, "files", name, as_of=as_of) for name in files.earlier} == files.earlier
        assert {each.name for each in list_files(files.url, "files", as_of=as_of)} == files.earlier.keys()
    with pytest.raises(JetcaptureError, match='object store files has no file "one" in the archive'):
        read_file(files.url, "files", "one", as_of=files.time - timedelta(days=1))
    (linked,) = (each.revision for each in list_files(files.url, "files") if each.name == "far link")
    assert read_file(files.url, "files", "far link", as_of=linked) == noise(400_000, 7), "in the store of that time"


def test_files_are_listed_with_their_metadata(files: Files) -> None:
    found = {each.name: each for each in list_files(files.url, "files")}
    others = {"store link", "dead link", "link a", "link b", "lost link", "not JSON", "md5"}
    assert found.keys() == files.now.keys() | others
    for name, each in found.items():
        if each.link is None and name not in others:
            assert (each.size, each.chunks) == (len(files.now[name]), -(-len(files.now[name]) // (128 * 1024)))
    assert found["far link"].link == ("other", "target")
    assert found["store link"].link == ("other", None)
    assert found["not JSON"].problem is not None


def test_what_cannot_be_given_back_is_refused_with_the_reason(files: Files) -> None:
    for name, problem in (
        ("deleted", r'"deleted" was deleted at 20\d\d-.*; as of an earlier time, it may be in the archive'),
        ("dead link", r'"deleted" was deleted at 20\d\d-'),
        ("old name", '"old name" was renamed to "new name"'),
        ("nothing", 'object store files has no file "nothing" in the archive'),
        ("store link", '"store link" is a link to the whole object store other, not to a file'),
        ("link a", "more than 10 links, which probably lead in a circle"),
        ("lost link", "the archive has no objects of stream OBJ_elsewhere"),
        ("not JSON", '"not JSON": its metadata cannot be read: '),
        ("md5", '"md5": unknown digest MD5=xyz'),
    ):
        with pytest.raises(JetcaptureError, match=problem):
            read_file(files.url, "files", name)


def objects(root: Path) -> list[layout.ObjectName]:
    names = (layout.parse_path(path.relative_to(root).as_posix()) for path in root.glob("OBJ_files/**/*.parquet"))
    return [name for name in names if name is not None]


@pytest.fixture
def copy(files: Files, tmp_path: Path) -> Files:
    """The archive's directory once more, to change it."""
    shutil.copytree(files.root, tmp_path / "copy")
    return Files(tmp_path / "copy", files.config, files.now, files.earlier, files.before, files.time)


def test_overlapping_objects_give_each_chunk_once(copy: Files) -> None:
    assert {name.key for name in objects(copy.root)} == {"M", "C"}, "metadata and contents are apart"
    for key in ("M", "C"):
        names = sorted((name for name in objects(copy.root) if name.key == key), key=lambda name: name.first_seq)
        day = [name for name in names if name.bucket == names[0].bucket]
        assert len(day) > 1
        merge(copy.root, day[: len(day) // 2 + 1], keep=True)
        merge(copy.root, day, keep=True)
    assert {name: read_file(copy.url, "files", name) for name in copy.now} == copy.now


def test_missing_chunks_are_noticed_and_nothing_is_left_behind(copy: Files, tmp_path: Path) -> None:
    for name in objects(copy.root):
        if name.key == "C":
            (copy.root / name.path).unlink()
    target = tmp_path / "target"
    target.write_bytes(b"before")
    with pytest.raises(JetcaptureError, match='"exact" is incomplete: the archive has 0 of 2 chunks and 0 of 262,144'):
        save_file(copy.url, "files", "exact", target)
    assert target.read_bytes() == b"before"
    assert not list(tmp_path.glob("*.partial")) + list(tmp_path.glob(".*.partial"))
    assert read_file(copy.url, "files", "empty") == b""


def test_damage_is_noticed(copy: Files) -> None:
    for name in objects(copy.root):
        if name.key == "C":
            data = bytearray((copy.root / name.path).read_bytes())
            for at in range(100, len(data) - 5_000, 4_096):
                data[at] ^= 1
            (copy.root / name.path).write_bytes(data)
    with pytest.raises(JetcaptureError, match=r"cannot read \S*OBJ_files/key=C/|SHA-256|incomplete"):
        read_file(copy.url, "files", "exact")


def test_a_file_goes_to_a_path_or_to_an_open_file(files: Files, tmp_path: Path) -> None:
    target = tmp_path / "replaced.bin"
    found = save_file(files.url, "files", "link", target)
    assert target.read_bytes() == files.now["replaced"]
    assert isinstance(found, ArchivedFile)
    assert (found.name, found.size) == ("replaced", 4 * MEBIBYTE)
    opened = io.BytesIO()
    save_file(files.url, "files", "one", opened)
    assert opened.getvalue() == b"x"
    with pytest.raises(JetcaptureError, match=r"cannot write .*: No such file or directory"):
        save_file(files.url, "files", "one", tmp_path / "missing" / "one")


def test_the_commands_list_files_and_write_them(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = jetcapture("get", files.config, "dir/größe 5 MiB.bin")
    assert (done.returncode, done.stdout, done.stderr) == (0, "größe 5 MiB.bin: 5,242,880 bytes\n", "")
    assert (tmp_path / "größe 5 MiB.bin").read_bytes() == files.now["dir/größe 5 MiB.bin"]
    again = jetcapture("get", files.config, "dir/größe 5 MiB.bin")
    assert (again.returncode, "--output: required: größe" in again.stderr) == (2, True)
    assert jetcapture("get", files.config, "deleted", "--as-of", files.before, "-o", "was").returncode == 0
    assert (tmp_path / "was").read_bytes() == files.earlier["deleted"]
    gone = jetcapture("get", files.config, "deleted")
    assert (gone.returncode, gone.stderr.count("\n")) == (1, 1)
    listed = jetcapture("files", files.config)
    assert (listed.returncode, "far link -> other/target" in listed.stdout) == (0, True)
    assert listed.stdout.splitlines()[-1].startswith(f"{len(files.now) + 7} files, ")
    lines = jetcapture("files", files.config, "--json", "--as-of", files.time.isoformat()).stdout.splitlines()
    sizes = {name: len(data) for name, data in files.earlier.items()}
    assert {json.loads(line)["name"]: json.loads(line)["bytes"] for line in lines} == sizes
    wrong = jetcapture("files", files.config, "--as-of", "soon")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    path = tmp_path / "of-a-stream.yaml"
    path.write_text(json.dumps(settings("nats://127.0.0.1:4222", tmp_path / "archive")))
    done = jetcapture("files", path)
    refused = "jetcapture: source.object_store: required for this command, but not set\n"
    assert (done.returncode, done.stderr) == (2, refused)
