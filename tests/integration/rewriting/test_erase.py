"""What is erased is gone from every object and copy, whatever happens meanwhile, and nothing else changes."""

from __future__ import annotations

import asyncio
import csv
import gzip
import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from nats.js.api import StreamSource
from pyiceberg.catalog import load_catalog

from jetcapture_py.archive import layout
from jetcapture_py.config.model import Config, parse
from jetcapture_py.errors import ConfigError, JetcaptureError
from jetcapture_py.manage import erase as command
from jetcapture_py.manage.many import show_one
from jetcapture_py.reading.arrow import read_archive
from jetcapture_py.rewriting import erase as module
from jetcapture_py.rewriting import select, text_objects
from jetcapture_py.rewriting.erase import Erasure, erase
from jetcapture_py.rewriting.select import Condition, Search
from jetcapture_py.store.archive import ArchiveFiles, File, open_archive
from jetcapture_py.verify.examine import ObjectExaminer
from jetcapture_py.verify.findings import Kind
from jetcapture_py.verify.proof import verify
from jetcapture_py.verify.repair import verify_and_repair
from tests.support.archives import HOUR, Archive, encoded, put
from tests.support.commands import jetcapture
from tests.support.maintaining import Maintenance, compare_tables
from tests.support.nats_server import NatsServer
from tests.support.restores import state_of
from tests.support.running import (
    STREAM,
    Message,
    capture_all,
    connection,
    objects,
    publish,
    publish_and_capture,
    settings,
)
from tests.support.versity import Versity, options

Start = Callable[..., NatsServer]
COUNT = 300
SETTINGS: dict[str, Any] = {
    "key": "{subject[1]}",
    "decode": {"format": "json", "columns": {"id": "int64", "text": "string"}, "keep_payload": True},
    "block": {"max_messages": 41, "interval": "1d"},
}
WHO = "Erika Mustermann"
REASON = "request 4711"
KEY = Condition(key="b")


def message(number: int) -> Message:
    """One in ten cannot be decoded; every customer has a key."""
    body = json.dumps({"id": number, "text": f'a "quoted"\nline of {WHO if number % 7 == 0 else number}'})
    return f"orders.{'abc'[number % 3]}", b"no" if number % 10 == 0 else body.encode(), [("N", str(number))]


def captured(start: Start, root: Path, count: int = COUNT, **sections: Any) -> Config:
    block = {**SETTINGS["block"], **sections.pop("block", {})}
    messages = [message(number) for number in range(count)]
    return publish_and_capture(start().url, root, messages, **{**SETTINGS, "block": block, **sections})


def run(config: Config, condition: Condition | str = KEY, **options: Any) -> Erasure:
    condition = Condition(where=condition) if isinstance(condition, str) else condition
    return asyncio.run(erase(config, condition, REASON, **options))


def read(root: Path) -> dict[int, dict[str, Any]]:
    """Every row of the archive and its quarantine, by sequence; none is there twice."""
    rows = [
        row
        for aside in (False, True)
        for row in read_archive(str(root), STREAM, quarantine=aside).read_all().to_pylist()
    ]
    found = {row[layout.SEQ]: row for row in rows}
    assert len(found) == len(rows)
    return found


def proven(config: Config, erased: int) -> None:
    report = asyncio.run(verify(config, deep=True))
    assert (report.complete, report.count(Kind.ERASED), report.exit_code(strict=True)) == (True, erased, 0)


def contents(root: Path) -> Iterator[bytes]:
    """The bytes of every file of an archive, text and pages as they are when they are not compressed."""
    for path in root.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            yield gzip.decompress(data) if path.name.endswith(".gz") else data


SELECTORS: dict[str, tuple[Condition | str, int, Callable[[int], bool]]] = {
    "key": (KEY, 2, lambda number: number % 3 == 1),
    "subject": (Condition(subject="*.c"), 0, lambda number: number % 3 == 2),
    "seq": (Condition(seqs=(7, 23)), 0, lambda number: 6 <= number < 23),
    "where": (
        f"_nats_payload = 'no'::BLOB AND _nats_seq = 211 OR decode(_nats_payload) LIKE '%{WHO}%'",
        *(2, lambda number: (number % 7 == 0 and number % 10 != 0) or number == 210),
    ),
}


@pytest.mark.parametrize("name", SELECTORS)
def test_a_selector_erases_its_messages_and_no_other_row_changes(nats_server: Start, tmp_path: Path, name: str) -> None:
    root, (select, bundles, gone) = tmp_path / "a", SELECTORS[name]
    config = captured(nats_server, root, block={"bundles": bundles, "compression": "none"})
    before, names = read(root), objects(root)
    expected = {seq: row for seq, row in before.items() if not gone(seq - 1)}
    dry = run(config, select, dry_run=True)
    assert (objects(root), (root / "_erased").exists()) == (names, False)
    done = run(config, select)
    assert (dry.messages, dry.copies) == (done.messages, done.copies)
    assert {(item.path, item.messages) for item in dry.objects} == {(item.path, item.messages) for item in done.objects}
    assert (done.messages, done.remaining) == (len(before) - len(expected), [])
    assert read(root) == expected
    proven(config, done.messages)
    (tombstone,) = (json.loads(path.read_text()) for path in (root / "_erased" / STREAM).iterdir())
    nothing_of_the_selector = {"format", "stream", "time", "by", "reason", "messages", "ranges", "times"}
    assert set(tombstone) == nothing_of_the_selector
    if name == "where":
        assert not any(WHO.encode() in data for data in contents(root)), "as grep finds it"
    after = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    again = run(config, select)
    assert (again.messages, again.objects, again.remaining) == (0, [], [])
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == after


def archive_at(root: Path | str, **sections: Any) -> Config:
    source, store = {"stream": STREAM, "consumer": "archive"}, {"url": str(root), **sections.pop("store", {})}
    return parse({"source": source, "store": store, **sections})


def archive_of(root: Path, *blocks: dict[str, Any]) -> Config:
    """An archive with an object for each of the arguments of `encoded`, whose `seqs` may be pairs with a time."""
    for block in blocks:
        seqs = block.pop("seqs")
        identities = [seq if isinstance(seq, tuple) else (seq, HOUR * 1_000_000 + seq) for seq in seqs]
        put(root, encoded(identities, bucket=HOUR, **block))
    return archive_at(root)


ZIPS = [{"zip": "01234"}, {"zip": "1234"}, {"zip": "2024-01-01T00:00:00Z"}, {"zip": "2024-01-01 00:00:00"}]


@pytest.mark.parametrize("format_", ["csv", "ndjson"])
def test_no_type_of_a_text_column_is_guessed_and_bytes_are_not_their_base64(
    nats_server: Start, tmp_path: Path, format_: str
) -> None:
    decode = {"format": "json", "columns": {"zip": "string"}, "keep_payload": True}
    messages = [("orders.a", json.dumps(each).encode(), [("N", str(at))]) for at, each in enumerate(ZIPS)]
    sections = {"block": {"format": format_}, "key": "", "decode": decode}
    config = publish_and_capture(nats_server().url, tmp_path / "a", messages, **sections)
    for where, count in (
        ("zip = '01234'", 1),
        ("zip = '2024-01-01 00:00:00'", 1),
        ("contains(decode(_nats_payload), '1234')", 2),
        ("_nats_headers['N'] = ['3'] AND key IS NULL", 1),
    ):
        done = run(config, where, dry_run=True)
        assert (done.messages, done.remaining) == (count, []), where
    other = config.model_copy(update={"decode": config.decode.model_copy(update={"columns": {}})})
    with pytest.raises(ConfigError, match=r"decode\.columns does not have the type"):
        run(other, "zip = '01234'")
    assert len(positions(config)) == len(ZIPS)


def test_a_condition_is_asked_of_every_copy_and_an_object_without_its_column_is_named(tmp_path: Path) -> None:
    """Which of two copies readers see does not matter."""
    for name, one, other, remaining in (("first", 4711, None, [3]), ("second", None, 4711, [])):
        root = tmp_path / name
        config = archive_of(root, {"seqs": (1, 2), "customer": one}, {"seqs": (1, 2, 3), "customer": other})
        (line,) = run(config, "customer = 4711").remaining
        assert "not searched: the condition does not fit its columns" in line
        assert sorted(set(positions(config))) == remaining


CONDITIONS = [
    "len(list_filter([größe], lambda each: each = 4711)) > 0",
    "len([each for each in [größe] if each = 4711]) > 0",
    "größe = 4711 AND _nats_timestamp < current_timestamp",
    '"Große" = 4711',
]


def test_a_condition_has_columns_of_any_name_and_may_have_parameters_and_the_time_now(tmp_path: Path) -> None:
    for number, where in enumerate(CONDITIONS):
        root = tmp_path / str(number)
        Archive(root).write([1, 2], None, columns={"größe": [4711, 1], "Große": [4711, 1]})
        config = archive_at(root)
        assert run(config, where).remaining == []
        assert positions(config) == [2], where
        with pytest.raises(ConfigError, match="does not fit its columns"):
            run(config, "len(list_filter([größe], lambda each: each = user)) > 0")


def test_messages_whose_headers_cannot_be_read_may_have_the_key_and_are_named(tmp_path: Path) -> None:
    """Of the same object, those with the key in a header that can be read are erased."""
    quarantined = {
        "stage": ["decode", "decode", "headers"],
        "error": ["not JSON"] * 3,
        "raw_headers": pa.array([None, None, b"NATS/1.0\r\nT\xff: b\r\n\r\n"], pa.binary()),
    }
    headers = [[("T", ["b"])], [("T", ["c"])], None]
    Archive(tmp_path).write([1, 2, 3], None, quarantine=True, headers=headers, columns=quarantined)
    config = archive_at(tmp_path)
    (line,) = run(config.model_copy(update={"key": "{header.T}"})).remaining
    assert positions(config) == [2, 3]
    assert "not searched: messages whose headers cannot be read have no key" in line
    config = config.model_copy(update={"key": "{subject[0]}"})
    assert run(config, Condition(key="orders")).remaining == [], "they are of no concern"


def test_a_message_that_moves_while_a_condition_is_evaluated_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = archive_of(tmp_path, {"seqs": (1,)}, {"seqs": (7,), "quarantine": True})
    (old,) = [name for name in objects(tmp_path) if name.quarantine]
    real = Search.selected

    def selects(self: Search, file: File) -> Any:
        found = real(self, file)
        if (tmp_path / old.path).exists() and file.name != old:  # decoded again
            archive_of(tmp_path, {"seqs": (7,)}, {"seqs": (8,), "quarantine": True})
            (tmp_path / old.path).unlink()
        return found

    monkeypatch.setattr(select, "THREADS", 1)  # so that the old one is not read before
    monkeypatch.setattr(Search, "selected", selects)
    assert run(config, "_nats_seq >= 7").remaining == []
    assert positions(config) == [1]


def test_a_damaged_footer_leaves_only_its_object_out_of_a_condition(tmp_path: Path) -> None:
    config = archive_of(tmp_path, {"seqs": (1, 2), "key": "a"}, {"seqs": (9,), "key": "b"})
    (path,) = (tmp_path / STREAM / "key=a").rglob("*.parquet")
    data = bytearray(path.read_bytes())
    data[800:804] = bytes(each ^ 255 for each in data[800:804])
    path.write_bytes(data)
    done = run(config, "_nats_seq IN (1, 9)")
    assert done.messages == 1
    assert "not searched: cannot read" in done.remaining[0]


def records(root: Path) -> list[tuple[str, ...]]:
    """The distinct lines of text objects; those of CSV as fields."""
    texts = (io.StringIO(data.decode(), newline="") for data in contents(root / STREAM))
    return sorted({tuple(row) for text in texts for row in csv.reader(text)})


@pytest.mark.parametrize(
    "block", [{"format": "ndjson"}, {"format": "csv", "compression": "none"}], ids=["ndjson", "csv"]
)
def test_lines_of_text_objects_go_and_the_others_stay_to_the_byte(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: dict[str, Any]
) -> None:
    monkeypatch.setattr(text_objects, "_PIECE", 100)  # lines are longer, and quotes are cut
    root, decode = tmp_path / "a", {**SETTINGS["decode"], "keep_payload": False}
    config = captured(nats_server, root, 100, block={**block, "bundles": 2}, decode=decode)
    before = records(root)
    done = run(config, f"text LIKE '%{WHO}%'")
    (line,) = done.remaining
    assert line.startswith("_quarantine/")
    assert "not searched: the condition does not fit its columns" in line
    assert done.messages == len([number for number in range(100) if number % 7 == 0 and number % 10])
    assert records(root) == [record for record in before if WHO not in str(record)]
    assert not any(WHO.encode() in data for data in contents(root))
    proven(config, done.messages)
    assert not run(config, Condition(seqs=(1, 100))).remaining
    assert objects(root) == []


def positions(config: Config) -> list[int]:
    archive = open_archive(config.store.url, {})
    named = [(file, file.name) for file in archive.files(STREAM) if file.name]
    return [seq for pair in named for seq in ObjectExaminer(archive, None).identities(*pair)[1].tolist()]


def test_of_two_messages_with_a_sequence_only_the_selected_one_is_erased(tmp_path: Path) -> None:
    """A stream that was rewound, without being created again, has given sequence 6 twice."""
    start = HOUR * 1_000_000
    config = archive_of(tmp_path, {"seqs": (5, 6)}, {"seqs": ((6, start + 9), (7, start + 10))})
    with pytest.raises(ConfigError, match="several messages have the same sequence"):
        run(config, Condition(seqs=(6, 6)))
    done = run(config, f"_nats_seq = 5 OR epoch_us(_nats_timestamp) >= {start + 9}")
    assert (done.messages, done.remaining) == (3, [])
    assert [(row[layout.SEQ], row[layout.TIMESTAMP].microsecond) for row in read(tmp_path).values()] == [(6, 6)]


class KilledError(BaseException):
    """The process is killed here."""


def test_what_killed_processes_left_goes_or_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = archive_of(tmp_path, {"seqs": (1, 2), "key": "b"}, {"seqs": (3,), "key": "c"})
    (path,) = (tmp_path / STREAM / "key=b").rglob("*.parquet")
    old, new = (path.with_name(f".{path.name}.{digit * 16}.tmp") for digit in "01")
    for copy in (old, new):
        shutil.copy(path, copy)
    os.utime(old, (1, 1))
    remove, any_other = ArchiveFiles.remove, Condition(seqs=(9, 9))

    def killed(archive: ArchiveFiles, file: File) -> None:
        if after:
            remove(archive, file)
        raise KilledError

    for after in (False, True):
        with monkeypatch.context() as patched:
            patched.setattr(ArchiveFiles, "remove", killed)
            with pytest.raises(KilledError):
                run(config)
        assert path.exists() is not after
    (line,) = run(config, any_other).remaining  # any selection ends what a tombstone has begun
    assert (new.name in line, old.exists(), path.exists()) == (True, False, False)
    os.utime(new, (1, 1))
    assert run(config, any_other).remaining == []
    assert not (tmp_path / STREAM / "key=b").exists(), "the key is not left in a directory's name"
    assert positions(config) == [3]


def test_an_object_that_is_a_symbolic_link_remains(tmp_path: Path) -> None:
    config = archive_of(tmp_path / "a", {"seqs": (1, 2), "key": "b"}, {"seqs": (3,), "key": "b"})
    path = next((tmp_path / "a").rglob("*-2-*.parquet"))
    elsewhere = path.rename(tmp_path / "elsewhere.parquet")
    path.symlink_to(elsewhere)
    reason = "it is a symbolic link, and the file it points to would stay"
    for dry_run in (True, False):
        (line,) = run(config, dry_run=dry_run).remaining
        assert line.startswith(f"{path.relative_to(tmp_path / 'a')}: {reason}")
    assert positions(config) == [1, 2]
    elsewhere.replace(path)
    assert (run(config).remaining, positions(config)) == ([], [])


def test_nothing_brings_erased_messages_back(nats_server: Start, tmp_path: Path) -> None:
    config = captured(nats_server, tmp_path / "a")
    run(config)
    asyncio.run(
        capture_all(config.model_copy(update={"source": config.source.model_copy(update={"consumer": "other"})}))
    )

    async def reset() -> None:
        async with connection(config.nats.servers[0]) as client:
            await client.jetstream().delete_consumer(STREAM, config.source.consumer)
        await capture_all(config)

    asyncio.run(reset())
    report, _ = asyncio.run(verify_and_repair(config, deep=True, content=True))
    assert (report.complete, report.count(Kind.ERASED)) == (True, 100)
    assert not [seq for seq in positions(config) if (seq - 1) % 3 == 1]


def test_in_the_stream_only_the_messages_themselves_are_deleted(nats_server: Start, tmp_path: Path) -> None:
    config = captured(nats_server, tmp_path / "a", 30)
    url = config.nats.servers[0]

    def deleted(**options: bool) -> tuple[int | None, list[str]]:
        done = run(config, in_stream=True, **options)
        return done.in_stream and done.in_stream.deleted, done.remaining

    assert deleted(dry_run=True) == deleted() == (10, [])
    assert sorted(asyncio.run(state_of(url, STREAM))["deleted"]) == [seq for seq in range(1, 31) if seq % 3 == 2]
    proven(config, 10)

    async def recreate() -> None:
        async with connection(url) as client:
            await client.jetstream().delete_stream(STREAM)
        await publish(url, [message(number) for number in range(30)])

    asyncio.run(recreate())
    assert deleted() == (0, [])
    assert asyncio.run(state_of(url, STREAM))["messages"] == 30


def test_a_stream_that_deletes_nothing_and_its_copies_remain(nats_server: Start, tmp_path: Path) -> None:
    config = captured(nats_server, tmp_path / "a", 30)

    async def changed() -> None:
        async with connection(config.nats.servers[0]) as client:
            js = client.jetstream()
            await js.add_stream(name="MIRROR", mirror=StreamSource(name=STREAM))
            await js.add_stream(name="COPY", sources=[StreamSource(name=STREAM)])
            info = await js.stream_info(STREAM)
            info.config.deny_delete = True
            await js.update_stream(info.config)
            while (await js.stream_info("MIRROR")).state.messages < 30:
                await asyncio.sleep(0.02)

    asyncio.run(changed())
    done = run(config, in_stream=True)
    assert done.in_stream
    assert done.in_stream.deleted == 0
    assert sorted(done.remaining) == [
        "stream COPY sources ORDERS and may have copies under other sequences",
        "stream MIRROR, a mirror of ORDERS, has 10 messages of them",
        "stream ORDERS has 10 messages of them: it is deny_delete, and deletes none",
    ]
    assert not done.remains  # in the archive
    mirrored = parse(settings(config.nats.servers[0], tmp_path / "b", source={"stream": "MIRROR"}))
    asyncio.run(capture_all(mirrored))
    assert run(mirrored, Condition(subject="orders.b")).messages == 10, "they are older than the mirror"
    for archived in (config, mirrored):
        proven(archived, 10)


@pytest.fixture
def tabulated(tmp_path: Path) -> tuple[Config, dict[str, str]]:
    """Two keys in objects of complete buckets, a table of them, and its catalog."""
    for key, first in (("a", 1), ("b", 101)):
        for start, bucket in ((first, HOUR), (first + 50, HOUR + 3600)):
            identities = [(seq, bucket * 1_000_000 + seq) for seq in range(start, start + 10)]
            put(tmp_path / "archive", encoded(identities, key=key, bucket=bucket))
    catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db"}
    table = {"name": "nats.orders", "catalog": catalog}
    maintain = {"compact": {"after": "0s", "grace": "0s", "target": "1MiB"}, "table": table}
    config = archive_at(tmp_path / "archive", maintain=maintain)
    Maintenance(config).run()
    return config, catalog


def answer(config: Config, capsys: pytest.CaptureFixture[str], **given: Any) -> tuple[int, dict[str, Any]]:
    """The exit code of the command, and its certificate."""
    condition = Condition.parse(*(given.pop(name, None) for name in ("key", "subject", "seqs", "where")))
    code = show_one(command.run(config, condition, REASON, **given), as_json=True)
    return code, json.loads(capsys.readouterr().out)


def test_a_table_and_its_snapshots_name_no_object_that_was_erased(
    tabulated: tuple[Config, dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    config, properties = tabulated
    with load_catalog("jetcapture", **properties) as catalog:
        table = catalog.load_table("nats.orders")
        table.manage_snapshots().create_tag(table.current_snapshot().snapshot_id, "audit").commit()
        code, certificate = answer(config, capsys, seqs="103-160")
        assert code == 1
        assert certificate["remains"][0] == "table nats.orders: audit names snapshots that have erased messages"
        assert "kept, because a table may still name it" in certificate["remains"][1]
        assert catalog.load_table("nats.orders").scan().count() == 22, "it has the new objects already"
        catalog.load_table("nats.orders").manage_snapshots().remove_tag("audit").commit()
        code, certificate = answer(config, capsys, seqs="103-160")
        assert (code, certificate["remains"], certificate["snapshots"]) == (0, [], 2)
        table = catalog.load_table("nats.orders")
        assert sorted(table.scan().to_arrow()[layout.SEQ].to_pylist()) == [*range(1, 11), *range(51, 61), 101, 102]
        manifests = [part for snapshot in table.metadata.snapshots for part in snapshot.manifests(table.io)]
        for entry in (entry for part in manifests for entry in part.fetch_manifest_entry(table.io)):
            assert Path(entry.data_file.file_path.removeprefix("file://")).exists()
    assert compare_tables(config) == []


def test_manifests_of_a_table_in_another_catalog_remain(
    tabulated: tuple[Config, dict[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"name": "nats.orders", "catalog": {**tabulated[1], "uri": f"sqlite:///{tmp_path}/other.db"}}
    config = archive_at(tmp_path / "archive", maintain={"table": other})
    found = {path: path.read_bytes() for path in (tmp_path / "archive/_table").rglob("*.avro")}
    for path in found:
        os.utime(path, (1, 1))
    code, certificate = answer(config, capsys, seqs="103-160")
    assert code == 1
    remains = f"{len(found)} manifests below _table/nats.orders/metadata, and the catalog has no table nats.orders: "
    assert certificate["remains"][0].startswith(remains)
    assert {path: path.read_bytes() for path in (tmp_path / "archive/_table").rglob("*.avro")} == found


def test_maintenance_that_puts_an_object_back_into_a_table_is_undone(
    tabulated: tuple[Config, dict[str, str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, properties = tabulated
    real, passes = module.remove_replaced, []

    def remove(*arguments: Any) -> Any:
        passes.append(Maintenance(config).run())
        return real(*arguments)

    monkeypatch.setattr(module, "remove_replaced", remove)
    for seqs, count in (("103-160", 22), ("1-160", 0)):
        passes.clear()
        code, certificate = answer(config, capsys, seqs=seqs)
        assert passes[0].tables["messages"].added
        assert (code, certificate["remains"]) == (0, [])
        assert compare_tables(config) == []
        with load_catalog("jetcapture", **properties) as catalog:
            assert catalog.load_table("nats.orders").scan().count() == count


def versioned(client: Any, bucket: str, *changes: tuple[str, tuple[int, ...]], versions_at: int = 0) -> None:
    """Put and delete objects of these sequences in a bucket that keeps versions, from change `versions_at` on."""
    client.create_bucket(Bucket=bucket, ObjectLockEnabledForBucket=bucket == "locked")
    for number, (change, seqs) in enumerate(changes):
        if number == versions_at:
            client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
        if number == versions_at and bucket == "locked":
            rule = {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 1}}
            lock = {"ObjectLockEnabled": "Enabled", "Rule": rule}
            client.put_object_lock_configuration(Bucket=bucket, ObjectLockConfiguration=lock)
        block = encoded([(seq, HOUR * 1_000_000 + seq) for seq in seqs], bucket=HOUR)
        body = {"Body": block.data.to_pybytes()} if change == "put" else {}
        getattr(client, f"{change}_object")(Bucket=bucket, Key=f"archive/{block.name.path}", **body)
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})


def versions(client: Any, bucket: str) -> set[tuple[str, bool]]:
    """The sequences in the names of all versions, and whether they are markers of a removal."""
    found = client.list_object_versions(Bucket=bucket, Prefix=f"archive/{STREAM}/")
    kinds = (("Versions", False), ("DeleteMarkers", True))
    names = [(entry["Key"].rpartition("/")[2], marker) for kind, marker in kinds for entry in found.get(kind, [])]
    return {(name.partition("-")[2][:41].replace("0", ""), marker) for name, marker in names}


def test_a_bucket_keeps_no_version_with_erased_messages_unless_object_lock_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = [("put", (1, 2)), ("put", (1, 2, 3, 4)), ("put", (9,)), ("delete", (1, 2)), ("delete", (9,))]
    with Versity(tmp_path, versions=True) as server, closing(server.client()) as client:

        def erased(bucket: str, seqs: str) -> dict[str, Any]:
            config = archive_at(f"s3://{bucket}/archive", store={"options": options(server.endpoint)})
            code, certificate = answer(config, capsys, seqs=seqs)
            assert code == bool(certificate["remains"])
            return certificate

        versioned(client, "versions", *changes)
        nine = {("9-9", False), ("9-9", True)}
        assert versions(client, "versions") == {("1-2", False), ("1-2", True), ("1-4", False), *nine}
        certificate = erased("versions", "2-3")
        assert (certificate["remains"], certificate["versions"]) == ([], 2)
        assert versions(client, "versions") == {("1-4", False), *nine}, "others stay"
        versioned(client, "locked", *changes)
        certificate = erased("locked", "2-3")
        assert (len(certificate["remains"]), certificate["versions"]) == (2, 0)
        assert all("an old version: cannot delete a version of locked/" in text for text in certificate["remains"])
        assert versions(client, "locked") >= {("1-2", False), ("1-4", False)}
        versioned(client, "later", ("put", (1, 2)), versions_at=1)
        certificate = erased("later", "2-2")
        assert (certificate["remains"], certificate["versions"]) == ([], 1), "from before the bucket had versions"
        assert versions(client, "later") == {("1-1", False)}


class Lines:
    suffix = ".lines"

    def write(self, table: pa.Table) -> bytes:
        return "".join(f"{seq}\n" for seq in table[layout.SEQ].to_pylist()).encode()


def test_a_format_of_ones_own_is_not_searched_and_what_it_may_have_remains(
    nats_server: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = captured(nats_server, tmp_path / "a", 60, block={"format": f"{__name__}:Lines", "max_messages": 7})
    for selected in ({"key": "b"}, {"seqs": "2-7"}, {"subject": "orders.a"}):
        code, certificate = answer(config, capsys, **selected)
        assert code == 1
        assert any("it is in a format of your own" in text for text in certificate["remains"])
        assert all(item["path"].startswith("_quarantine") for item in certificate["objects"])


WRONG: list[dict[str, str]] = [
    *({}, {"key": "a", "seqs": "1"}, {"seqs": "9-3"}, {"seqs": "x"}, {"key": ""}, {"subject": "a..b"}),
    *({"where": "1 = 1); DROP VIEW archive; SELECT (1"}, {"where": "'"}, {"where": "no_column = 1"}),
    *({"where": "user = 'no_column_either'"}, {"where": "true) UNION ALL SELECT 1 WHERE (true"}),
    *({"where": "id IN (SELECT 1)"}, {"where": "true) ORDER BY (1"}, {"where": "COLUMNS(*) = 1"}),
]


def test_the_certificate_says_what_was_done_and_arguments_are_checked_first(
    nats_server: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "a"
    config = captured(nats_server, root, 30, key="{id}", block={"max_messages": 100, "bundles": 1})
    before = {name.path: hashlib.sha256((root / name.path).read_bytes()).hexdigest() for name in objects(root)}
    for wrong in WRONG:
        with pytest.raises(ConfigError, match="--where" if "where" in wrong else None):
            answer(config, capsys, **wrong)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    assert jetcapture("erase", path, "--key", "7", "--reason", " ").returncode == 2
    assert not (root / "_erased").exists()
    done = jetcapture("erase", path, "--key", "7", "--reason", REASON, "--json")
    certificate = json.loads(done.stdout)
    (changed,) = certificate["objects"]
    assert done.returncode == 1, "the quarantine does not say which of its messages have the key"
    assert "select them by --subject or --where" in certificate["remains"][0]
    assert (changed["messages"], changed["sha256"]) == (1, before[changed["path"]])
    assert changed["sha256_after"] == hashlib.sha256((root / changed["after"]).read_bytes()).hexdigest()
    tombstone = json.loads((root / certificate["tombstone"]).read_text())
    assert (tombstone["messages"], tombstone["reason"], tombstone["by"]) == (1, REASON, certificate["by"])
    code = show_one(command.run(config, Condition.parse(None, "orders.*", None, None), REASON, in_stream=True))
    lines = capsys.readouterr().out.splitlines()
    assert (code, lines[0]) == (0, "stream ORDERS: 29 messages erased")
    assert "in the stream: 30 messages deleted and overwritten" in lines
    assert lines[-1] == "nothing remains in the archive and the stream of what was stored up to sequence 30"
    assert "key=" not in (root / "_watermark/ORDERS/archive.json").read_text()
    with pytest.raises(JetcaptureError, match="no archive of stream ORDERS under"):
        run(archive_at(tmp_path / "b"))


def test_the_notes_name_what_no_erasure_reaches_and_no_temporary_file_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = archive_of(tmp_path / "a", {"seqs": (1, 2), "key": "b"})
    limits = {"spool": {"path": str(tmp_path / "spool"), "size": "1GiB"}}
    for spooling in (False, True):
        notes = run(archive_at(tmp_path / "a", **({"limits": limits} if spooling else {})), dry_run=True).notes
        assert any(line.startswith("the spool") for line in notes) is spooling
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    done = run(config, "_nats_seq = 2")
    assert (done.remaining, done.up_to, positions(config)) == ([], None, [1])
    assert any(line.startswith("messages that were not stored yet, and what running captures") for line in done.notes)
