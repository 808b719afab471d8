"""`maintain.keep` removes old buckets, and everything else knows that they are gone on purpose."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Collection, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fsspec
import pytest
from pyiceberg.catalog import load_catalog

from jetcapture_py import read_archive
from jetcapture_py.archive import layout
from jetcapture_py.archive.removed import Expired, expired_path
from jetcapture_py.config.model import Config
from jetcapture_py.errors import StoreError
from jetcapture_py.maintain.expire import Expiry
from jetcapture_py.store.archive import ArchiveFiles, File
from jetcapture_py.verify.examine import ObjectExaminer
from jetcapture_py.verify.findings import Kind, Verdict
from jetcapture_py.verify.proof import verify
from jetcapture_py.verify.repair import verify_and_repair
from tests.support.archives import Archive, encoded, put
from tests.support.commands import jetcapture
from tests.support.maintaining import compare_tables
from tests.support.nats_server import NatsServer
from tests.support.restores import main as restore
from tests.support.running import CONSUMER, STREAM, capture_all, config, connection, objects
from tests.support.several import of_stream, write

Start = Callable[..., NatsServer]
DAY = 86_400
DAYS, KEPT = 30, 11
"""Days of the stream; with `keep: 10d` today's bucket and ten that ended since then stay."""
EACH = 10
"""Messages a day, the last of which cannot be decoded."""


def thirty_days(url: str, directory: Path) -> None:
    """Create the stream as it would be after thirty days, by restoring it from an archive."""
    seed = Archive(directory / "seed")
    while time.time() % DAY > DAY - 300:  # no bucket may end during the test
        time.sleep(1)
    today = int(time.time()) // DAY * DAY
    for day in range(DAYS):
        seqs = [*range(day * EACH + 1, day * EACH + EACH + 1)]
        for key, own in (("a", seqs[::2]), ("b", seqs[1::2])):
            payloads = [b"not JSON" if seq % EACH == 0 else b'{"id": %d}' % seq for seq in own]
            bucket = today - (DAYS - 1 - day) * DAY
            seed.write(own, key, bucket=bucket, subject=f"orders.{key}", payloads=payloads)
    settings = of_stream(url, STREAM, seed.root)
    settings["stream"] = {"name": STREAM, "subjects": ["orders.>"]}
    path = write(directory, "stream", settings)
    arguments = [seed.url, STREAM, "--servers", url, "--stream-config", str(path)]
    assert restore(arguments) == 0


def captured(settings: Config) -> None:
    asyncio.run(capture_all(settings))


def seqs(root: Path) -> list[int]:
    parts = [part for part in (False, True) if not part or (root / layout.QUARANTINE).exists()]
    tables = [read_archive(str(root), STREAM, quarantine=quarantine).read_all() for quarantine in parts]
    return sorted(seq for table in tables for seq in table[layout.SEQ].to_pylist())


def table_seqs(catalog: dict[str, str]) -> list[int]:
    """What tables of messages and quarantine have."""
    with load_catalog("jetcapture", **catalog) as opened:
        tables = [
            opened.load_table(name).scan(selected_fields=(layout.SEQ,)).to_arrow()
            for name in ("nats.orders", "nats.dead")
        ]
    return sorted(seq for table in tables for seq in table[layout.SEQ].to_pylist())


def expiry(root: Path | str, keep: float = 10 * DAY, **parts: Any) -> Expiry:
    return Expiry(ArchiveFiles(str(root), {}), STREAM, keep, **parts)


def note(root: Path) -> Expired:
    return Expired.decode((root / expired_path(STREAM)).read_bytes(), STREAM, "x.json")


def test_thirty_days_of_which_ten_are_kept(nats_server: Start, tmp_path: Path) -> None:
    server, root = nats_server(), tmp_path / "archive"
    catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db"}
    thirty_days(server.url, tmp_path)
    sections: dict[str, Any] = {
        "key": "{subject[1]}",
        "block": {"interval": "1d"},
        "decode": {"format": "json", "columns": {"id": "int64"}},
        "maintain": {
            "keep": "10d",
            "compact": {"after": "0s", "grace": "0s"},
            "table": {"name": "nats.orders", "catalog": catalog, "quarantine": "nats.dead"},
        },
    }
    settings = config(server.url, root, **sections)
    path = write(tmp_path / "captures", "orders", of_stream(server.url, STREAM, root, **sections))
    captured(settings)
    gone, kept = (DAYS - KEPT) * EACH, [*range((DAYS - KEPT) * EACH + 1, DAYS * EACH + 1)]
    before = len(objects(root))
    assert before == DAYS * 3

    forever = {**sections, "maintain": {**sections["maintain"], "keep": None}}
    asked = write(tmp_path / "forever", "orders", of_stream(server.url, STREAM, root, **forever))
    assert jetcapture("maintain", asked).returncode == 0
    assert table_seqs(catalog) == [*range(1, (DAYS - 1) * EACH + 1)]
    planned = jetcapture("maintain", path, "--dry-run")
    assert planned.returncode == 0, planned.stderr
    assert planned.stdout.splitlines()[-1].startswith(f"{STREAM}: would expire: 57 objects in 19 time slices up to ")
    assert (len(objects(root)), (root / "_expired").exists()) == (before, False)

    killed = expiry(root)
    killed.record()  # a kill after this, and after some of the objects are removed: oldest first
    report = asyncio.run(verify(settings))
    assert (report.verdict, report.exit_code(strict=True)) == (Verdict.COMPLETE, 0), report.as_text()
    assert f"{gone} of them are stored: the next jetcapture maintain removes them" in report.as_text()
    assert [file.path.rpartition("date=")[2][:10] for file in killed.due] == sorted(
        file.path.rpartition("date=")[2][:10] for file in killed.due
    )
    killed.due = killed.due[:20]
    killed.remove()
    report = asyncio.run(verify(settings))
    assert (report.verdict, report.exit_code(strict=True)) == (Verdict.COMPLETE, 0), report.as_text()

    done = jetcapture("maintain", path, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["expired"]["objects"] == 57 - 20
    assert seqs(root) == kept
    assert all(any(place.iterdir()) for place in (root / STREAM).rglob("*") if place.is_dir()), "none is left empty"
    assert table_seqs(catalog) == [seq for seq in kept if seq <= (DAYS - 1) * EACH]  # today's bucket has not ended
    assert [found.summary for found in compare_tables(settings) if found.severity] == []
    report, repair = asyncio.run(verify_and_repair(settings))
    assert (report.verdict, report.exit_code(strict=True), repair.stored) == (Verdict.COMPLETE, 0, 0)
    assert report.stored == len(kept)
    (finding,) = report.of(Kind.EXPIRED)
    assert finding.summary.startswith(f"{gone} messages up to sequence {gone}, in time slices up to ")
    assert report.as_text().splitlines()[0].endswith(f"is stored; {gone} expired")
    assert jetcapture("maintain", path).stdout.splitlines()[-1] == f"{STREAM}: nothing has expired"

    async def recreate() -> None:
        async with connection(server.url) as client:
            await client.jetstream().delete_consumer(STREAM, CONSUMER)
        await capture_all(settings)

    asyncio.run(recreate())  # stored once more, until the next pass
    assert len(seqs(root)) == DAYS * EACH
    both = [expiry(root), expiry(root)]  # two at once
    for one in both:
        one.record()
    assert [one.remove().errors for one in both] == [(), ()]
    assert seqs(root) == kept
    assert note(root).messages == gone
    (root / next(name for name in objects(root) if name.key == "a").path).unlink()
    report = asyncio.run(verify(settings))
    assert (report.verdict, report.missing) == (Verdict.INCOMPLETE, EACH // 2)


def put_text(root: Path, bucket: int, messages: Iterable[tuple[int, int]]) -> Path:
    """Store messages, by sequence and microseconds, in NDJSON."""
    seqs, micros = zip(*messages, strict=True)
    digest = layout.digest(*(b"".join(n.to_bytes(8, "little") for n in column) for column in (seqs, micros)))
    name = layout.ObjectName(
        stream=STREAM,
        key="eu",
        bucket=bucket,
        first_seq=seqs[0],
        last_seq=seqs[-1],
        rows=len(seqs),
        digest=digest,
        suffix=".ndjson",
    )
    path = root / name.path
    path.parent.mkdir(parents=True, exist_ok=True)
    times = (datetime.fromtimestamp(at // 1_000_000, UTC).replace(microsecond=at % 1_000_000) for at in micros)
    path.write_text(
        "".join(
            f'{{"{layout.SEQ}":{seq},"{layout.TIMESTAMP}":"{at.isoformat()}"}}\n'
            for seq, at in zip(seqs, times, strict=True)
        )
    )
    return path


def test_every_object_tells_the_end_of_its_bucket_and_its_incarnation(tmp_path: Path) -> None:
    """Text does not tell its interval, so it stays for a day longer; nor its incarnation, which times tell."""
    now = int(time.time())
    first, second = ("2024-01-01T00:00:00Z", "2024-06-01T00:00:00Z")
    start = int(datetime(2024, 6, 1, tzinfo=UTC).timestamp())

    def messages(*seqs: int, at: int) -> Iterable[tuple[int, int]]:
        return [(seq, at * 1_000_000 + seq) for seq in seqs]

    put(tmp_path, encoded(messages(1, 2, 3, 9, at=start - DAY), created=first, bucket=start - DAY))
    put(tmp_path, encoded(messages(1, 2, at=start + DAY), created=second, bucket=start + DAY))
    both = [*messages(5, at=start - DAY), *messages(5, at=start + DAY)]
    put(tmp_path, encoded(both, created=f"{first},{second}", bucket=start))
    hour = now // 900 * 900
    ended = put(tmp_path, encoded(messages(20, at=hour), created=second, bucket=hour - 7200))
    open_ = put(tmp_path, encoded(messages(21, at=hour), created=second, bucket=hour - 900))
    damaged = put(tmp_path, encoded(messages(22, at=start), created=second, bucket=start))
    damaged.write_bytes(b"PAR1" + damaged.read_bytes()[100:])
    text = put_text(tmp_path, start + DAY, messages(30, 31, at=start + 2 * DAY))
    put_text(tmp_path, start - 400 * DAY, messages(40, 41, at=start - 400 * DAY))  # before every known creation
    foreign = text.with_suffix(".notes")
    foreign.write_text("not an object of ours")

    one = expiry(tmp_path, 3600)
    one.record()
    done = one.remove()
    assert {path for path in (tmp_path / STREAM).rglob("*") if path.is_file()} == {open_, damaged, foreign}
    assert not ended.exists()
    (error,) = done.errors
    assert "it stays, because what it holds cannot be recorded" in error
    assert {part.created: (part.messages, part.ranges) for part in note(tmp_path).incarnations} == {
        first: (5, ((1, 3), (5, 5), (9, 9))),
        second: (6, ((1, 2), (5, 5), (20, 20), (30, 31))),
        "": (2, ((40, 41),)),
    }


class Refusing(ArchiveFiles):
    """Denies access to objects."""

    refused: Collection[str] = ()

    def read(self, file: File, start: int = 0, end: int | None = None) -> bytes:
        if file.path in self.refused:
            raise StoreError(f"cannot read {file.path}: access denied")
        return super().read(file, start, end)


def test_an_object_that_the_store_denies_stays_and_the_others_expire(tmp_path: Path) -> None:
    paths = [put(tmp_path, encoded([(1, 1_000_000)], bucket=bucket)) for bucket in (0, 900, 1800)]
    archive = Refusing(str(tmp_path), {})
    denied = str(paths[1].relative_to(tmp_path))
    archive.refused = [denied]
    one = Expiry(archive, STREAM, 3600)
    one.record()
    done = one.remove()
    (error,) = done.errors
    assert error == f"cannot read {denied}: access denied; it stays, because what it holds cannot be recorded"
    assert [path.exists() for path in paths] == [False, True, False]
    more = [put(tmp_path, encoded([(number, number)], key=f"{number}", bucket=0)) for number in range(60)]
    archive.refused = [str(path.relative_to(tmp_path)) for path in more]
    with pytest.raises(StoreError):  # the store is away
        Expiry(archive, STREAM, 3600).record()


def test_texts_of_a_remote_store_are_in_memory_only_as_its_limit_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    held, most, store = [0], [0], fsspec.filesystem("memory")
    digest = layout.digest((1).to_bytes(8, "little"), (1_000_000).to_bytes(8, "little"))
    row = f'{{"{layout.SEQ}":1,"{layout.TIMESTAMP}":"1970-01-01T00:00:01Z","v":"{"x" * (1 << 20)}"}}\n'
    for key in range(20):
        name = layout.ObjectName(
            stream=STREAM, key=f"{key}", bucket=0, first_seq=1, last_seq=1, rows=1, digest=digest, suffix=".ndjson"
        )
        store.pipe(f"/expiry/{name.path}", row.encode())
    identities = ObjectExaminer.identities

    def watched(self: ObjectExaminer, file: File, name: layout.ObjectName) -> Any:
        held[0] += file.size
        most[0] = max(most[0], held[0])
        try:
            return identities(self, file, name)
        finally:
            held[0] -= file.size

    monkeypatch.setattr(ObjectExaminer, "identities", watched)
    one = expiry("memory://expiry", 3600, memory=64 << 20, dry_run=True)
    one.record()
    assert len(one.due) == 20
    assert most[0] < 3 << 20


def test_objects_in_a_format_of_ones_own_stay_and_fail_the_pass(tmp_path: Path) -> None:
    path = put(tmp_path, encoded([(1, 1_000_000)], bucket=0))
    path = path.rename(path.with_suffix(".lines"))
    one = expiry(tmp_path, 3600, own_suffix=".lines")
    one.record()
    done = one.remove()
    (error,) = done.errors
    assert error == ("ORDERS: 1 expired object in a format of your own left, not searched: remove them yourself")
    assert path.exists()
