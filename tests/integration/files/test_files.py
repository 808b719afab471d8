"""Files of an object store, captured by the real daemon while it is in use, given back from the archive."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
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
        commands = []
        for name in ("files", "other"):
            source = {"object_store": name, "consumer": "archive"}
            capture = settings(server.url, found.root, block={"interval": "24h", "max_age": "200ms"}) | {
                "source": source
            }
            commands.append(Command(place, capture, name).start())
        try:
            asyncio.run(use(server.url, found))
            for command in commands:
                command.process.send_signal(signal.SIGTERM)
                assert command.wait() == 0, command.log
        finally:
            for command in commands:
                command.kill()
    return found


def test_every_file_is_given_back_byte_for_byte(files: Files) -> None:
    assert {name: read_file(files.url, "files", name) for name in files.now} == files.now
    assert read_file(files.url, "other", "target") == noise(400_000, 7)


def test_files_are_given_back_as_they_were(files: Files) -> None:
    for as_of in (files.before, files.time):
        assert {name: read_file(files.url, "files", name, as_of=as_of) for name in files.earlier} == files.earlier
        assert {each.name for each in list_files(files.url, "files", as_of=as_of)} == files.earlier.keys()
    with pytest.raises(JetcaptureError, match='object store files has no file "one" in the archive'):
        read_file(files.url, "files", "one", as_of=files.time - timedelta(days=1))


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


def test_a_link_in_an_earlier_revision_leads_to_the_other_store_of_that_time(files: Files) -> None:
    (last,) = (each.revision for each in list_files(files.url, "files") if each.name == "far link")
    assert read_file(files.url, "files", "far link", as_of=last) == noise(400_000, 7)


def objects(root: Path) -> list[layout.ObjectName]:
    names = (layout.parse_path(path.relative_to(root).as_posix()) for path in root.glob("OBJ_files/**/*.parquet"))
    return [name for name in names if name is not None]


@pytest.fixture
def copy(files: Files, tmp_path: Path) -> Files:
    """The archive's directory once more, to change it."""
    shutil.copytree(files.root, tmp_path / "copy")
    return Files(tmp_path / "copy", files.config, files.now, files.earlier, files.before, files.time)


def test_metadata_and_contents_are_apart(files: Files) -> None:
    assert {name.key for name in objects(files.root)} == {"M", "C"}


def test_overlapping_objects_give_each_chunk_once(copy: Files) -> None:
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


def jetcapture(*words: str, cwd: Path) -> subprocess.CompletedProcess[bytes]:
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    words = (sys.executable, "-m", "jetcapture_py", *words)
    return subprocess.run(words, capture_output=True, timeout=300, check=False, cwd=cwd, env=environment)


def test_the_commands_list_files_and_write_them(files: Files, tmp_path: Path) -> None:
    config = str(files.config)
    done = jetcapture("get", config, "dir/größe 5 MiB.bin", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode() == "größe 5 MiB.bin: 5,242,880 bytes\n"
    assert (tmp_path / "größe 5 MiB.bin").read_bytes() == files.now["dir/größe 5 MiB.bin"]
    again = jetcapture("get", config, "dir/größe 5 MiB.bin", cwd=tmp_path)
    assert again.returncode == 2
    assert b"--output: required: gr" in again.stderr
    earlier = jetcapture("get", config, "deleted", "--as-of", str(files.before), "-o", "-", cwd=tmp_path)
    assert (earlier.returncode, earlier.stdout) == (0, files.earlier["deleted"])
    gone = jetcapture("get", config, "deleted", cwd=tmp_path)
    assert (gone.returncode, gone.stderr.count(b"\n")) == (1, 1)
    listed = jetcapture("files", config, cwd=tmp_path)
    assert listed.returncode == 0
    assert "far link -> other/target" in listed.stdout.decode()
    assert listed.stdout.decode().splitlines()[-1].startswith(f"{len(files.now) + 7} files, ")
    lines = jetcapture("files", config, "--json", "--as-of", files.time.isoformat(), cwd=tmp_path).stdout.splitlines()
    assert {json.loads(line)["name"]: json.loads(line)["bytes"] for line in lines} == {
        name: len(data) for name, data in files.earlier.items()
    }
    wrong = jetcapture("files", config, "--as-of", "soon", cwd=tmp_path)
    assert (wrong.returncode, wrong.stderr.count(b"\n")) == (2, 1)


def test_commands_for_files_refuse_other_streams(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(settings("nats://127.0.0.1:4222", tmp_path / "archive")))
    done = jetcapture("files", str(path), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == b"jetcapture: source.object_store: required for this command, but not set\n"


Start = Callable[..., NatsServer]


USE = """
import sys
from pathlib import Path
from jetcapture_py.files import save_file
from tests.support.memory import peak_resident
save_file(sys.argv[1], "files", sys.argv[2], Path(sys.argv[3]))
print(peak_resident() >> 20)
"""


@pytest.mark.exhaustive
def test_a_large_file_does_not_need_its_size_in_memory(nats_server: Start, tmp_path: Path) -> None:
    server, root = nats_server(), tmp_path / "archive"
    large = noise(MEBIBYTE, 10) * 300

    async def put() -> None:
        async with connection(server.url) as client:
            store = await client.jetstream().create_object_store("files")
            await store.put("small", b"x")
            await store.put("large", large)

    asyncio.run(put())
    found = settings(server.url, root) | {"source": {"object_store": "files", "consumer": "archive"}}
    with Command(tmp_path, found).start("--until-caught-up") as command:
        assert command.wait() == 0, command.log
    used = {}
    for name in ("small", "large"):
        words = [sys.executable, "-c", USE, str(root), name, str(tmp_path / name)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
        used[name] = int(done.stdout)
    assert (tmp_path / "large").read_bytes() == large
    assert used["large"] - used["small"] < 100
