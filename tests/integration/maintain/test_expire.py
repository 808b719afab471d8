"""`maintain.keep` removes old buckets, and everything else knows that they are gone on purpose."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog import load_catalog

from jetcapture_py import read_archive
from jetcapture_py.archive import layout
from jetcapture_py.archive.removed import Expired, expired_path
from jetcapture_py.errors import StoreError
from jetcapture_py.maintain.expire import Expiry
from jetcapture_py.store.archive import ArchiveFiles, File
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
    settings = of_stream(url, STREAM, seed.root) | {"stream": {"name": STREAM, "subjects": ["orders.>"]}}
    assert restore([seed.url, STREAM, "--servers", url, "--stream-config", str(write(directory, "s", settings))]) == 0


def seqs(root: Path) -> list[int]:
    tables = [read_archive(str(root), STREAM, quarantine=quarantine).read_all() for quarantine in (False, True)]
    return sorted(seq for table in tables for seq in table[layout.SEQ].to_pylist())


def table_seqs(catalog: dict[str, str]) -> list[int]:
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


def test_thirty_days_of_which_ten_are_kept(server: NatsServer, tmp_path: Path) -> None:
    root = tmp_path / "archive"
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
    asyncio.run(capture_all(settings))
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
    days = [file.path.rpartition("date=")[2][:10] for file in killed.due]
    assert days == sorted(days)
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


def put_text(root: Path, bucket: int, *messages: tuple[int, int]) -> Path:
    """Store messages, by sequence and microseconds, in NDJSON."""
    seqs, micros = zip(*messages, strict=True)
    digest = layout.digest(*(b"".join(n.to_bytes(8, "little") for n in column) for column in (seqs, micros)))
    named = {"first_seq": seqs[0], "last_seq": seqs[-1], "rows": len(seqs), "digest": digest, "suffix": ".ndjson"}
    path = root / layout.ObjectName(stream=STREAM, key="eu", bucket=bucket, **named).path
    path.parent.mkdir(parents=True, exist_ok=True)
    times = (datetime.fromtimestamp(at // 1_000_000, UTC).replace(microsecond=at % 1_000_000) for at in micros)
    rows = ({layout.SEQ: seq, layout.TIMESTAMP: at.isoformat()} for seq, at in zip(seqs, times, strict=True))
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_every_object_tells_the_end_of_its_bucket_and_its_incarnation(tmp_path: Path) -> None:
    """Text does not tell its interval, so it stays for a day longer; nor its incarnation, which times tell."""
    first, second = "2024-01-01T00:00:00Z", "2024-06-01T00:00:00Z"
    start, hour = int(datetime(2024, 6, 1, tzinfo=UTC).timestamp()), int(time.time()) // 900 * 900

    def messages(*seqs: int, at: int) -> list[tuple[int, int]]:
        return [(seq, at * 1_000_000 + seq) for seq in seqs]

    def store(*found: tuple[int, int], created: str, bucket: int) -> Path:
        return put(tmp_path, encoded(found, created=created, bucket=bucket))

    store(*messages(1, 2, 3, 9, at=start - DAY), created=first, bucket=start - DAY)
    store(*messages(1, 2, at=start + DAY), created=second, bucket=start + DAY)
    both = [*messages(5, at=start - DAY), *messages(5, at=start + DAY)]
    store(*both, created=f"{first},{second}", bucket=start)
    store(*messages(20, at=hour), created=second, bucket=hour - 7200)
    open_ = store(*messages(21, at=hour), created=second, bucket=hour - 900)
    damaged = store(*messages(22, at=start), created=second, bucket=start)
    damaged.write_bytes(b"PAR1" + damaged.read_bytes()[100:])
    text = put_text(tmp_path, start + DAY, *messages(30, 31, at=start + 2 * DAY))
    put_text(tmp_path, start - 400 * DAY, *messages(40, 41, at=start - 400 * DAY))  # before every known creation
    foreign, own = text.with_suffix(".notes"), put(tmp_path, encoded([(1, 1_000_000)], bucket=0))
    foreign.write_text("not an object of ours")
    own = own.rename(own.with_suffix(".lines"))

    one = expiry(tmp_path, 3600, own_suffix=".lines")
    one.record()
    errors = one.remove().errors
    assert {path for path in (tmp_path / STREAM).rglob("*") if path.is_file()} == {open_, damaged, foreign, own}
    assert sorted(["it stays, because what it holds cannot be recorded" in error for error in errors]) == [False, True]
    assert "ORDERS: 1 expired object in a format of your own left, not searched: remove them yourself" in errors
    assert {part.created: (part.messages, part.ranges) for part in note(tmp_path).incarnations} == {
        first: (5, ((1, 3), (5, 5), (9, 9))),
        second: (6, ((1, 2), (5, 5), (20, 20), (30, 31))),
        "": (2, ((40, 41),)),
    }


def test_an_object_that_the_store_denies_stays_and_the_others_expire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [put(tmp_path, encoded([(1, 1_000_000)], bucket=bucket)) for bucket in (0, 900, 1800)]
    denied, real = {str(paths[1].relative_to(tmp_path))}, ArchiveFiles.read

    def read(archive: ArchiveFiles, file: File, *bounds: Any) -> bytes:
        if file.path in denied:
            raise StoreError(f"cannot read {file.path}: access denied")
        return real(archive, file, *bounds)

    monkeypatch.setattr(ArchiveFiles, "read", read)
    one = expiry(tmp_path, 3600)
    one.record()
    (error,) = one.remove().errors
    assert error.endswith(": access denied; it stays, because what it holds cannot be recorded")
    assert [path.exists() for path in paths] == [False, True, False]
    more = [put(tmp_path, encoded([(number, number)], key=f"{number}", bucket=0)) for number in range(60)]
    denied |= {str(path.relative_to(tmp_path)) for path in more}
    with pytest.raises(StoreError):  # the store is away
        expiry(tmp_path, 3600).record()
