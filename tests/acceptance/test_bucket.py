"""A KV bucket, captured by the real daemon while it is in use, read as it was at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.errors import NotFoundError

from jetcapture_py import read_bucket
from jetcapture_py.config.buckets import AsOf
from jetcapture_py.config.units import moment_of
from tests.integration.manage.api import ask
from tests.support.kv import Entry, held
from tests.support.nats_server import NatsServer
from tests.support.running import Command, connection, settings, until

BUCKET, STREAM = "settings", "KV_settings"
KEYS, REVISIONS, SNAPSHOTS = 500, 10_000, 50
HISTORY = 5
BUSY, QUIET = 300, 5
"""Keys that most revisions are of, and how many revisions of a batch are of the others."""
AT_ONCE = 50
"""Revisions, each of another key, after which the writer waits for the capture: what a bucket removes before is never
delivered."""
LAG = 5_000_000
"""Microseconds around the end of a TTL in which the server may not have removed the entry yet."""
SECOND = 1_000_000
BUCKET_CONFIG: dict[str, Any] = dict.fromkeys(
    ("allow_rollup_hdrs", "allow_direct", "deny_delete", "allow_msg_ttl"), True
)
BUCKET_CONFIG |= {"name": STREAM, "subjects": [f"$KV.{BUCKET}.>"], "max_msgs_per_subject": HISTORY, "discard": "new"}
BUCKET_CONFIG["subject_delete_marker_ttl"] = 3_000_000_000  # shorter TTLs of entries are raised to it


class Snapshot(NamedTuple):
    seq: int
    before: int
    after: int
    values: dict[str, tuple[int, bytes]]


def entry(message: Msg) -> Entry:
    headers = message.headers or {}
    marker, ttl = "Nats-Marker-Reason" in headers, headers.get("Nats-TTL")
    return Entry(
        seq=message.metadata.sequence.stream,
        time=int(message.reply.split(".")[7]) // 1000,
        key=message.subject.split(".", 2)[2],
        put=not marker and "KV-Operation" not in headers,
        value=message.data,
        ttl=None if ttl is None else int(ttl.removesuffix("s")) * SECOND,
        clears=marker or headers.get("Nats-Rollup") == "sub",
    )


def changes(choose: random.Random, batch: int) -> Iterator[tuple[str, bytes, dict[str, str]]]:
    """Random changes of different keys: key, value and headers. Most are of busy keys; others have time to expire."""
    keys = choose.sample(range(BUSY), AT_ONCE - QUIET) + choose.sample(range(BUSY, KEYS), QUIET)
    for number, key in enumerate(keys, batch * AT_ONCE):
        kind, ttl = choose.random(), {"Nats-TTL": str(choose.randint(3, 5))}
        value = json.dumps({"n": number}).encode() if choose.random() < 0.9 else b"not JSON %d" % number
        if kind < 0.08:
            value, headers = b"", {"KV-Operation": "DEL"}
        elif kind < 0.16:
            value, headers = b"", {"KV-Operation": "PURGE", "Nats-Rollup": "sub", **(ttl if kind < 0.12 else {})}
        else:
            short = kind < (0.6 if key >= BUSY else 0.2)
            headers = ttl if short else {"Nats-TTL": "3600"} if kind > 0.95 else {}
        yield f"team.{key}", value, headers


def now() -> int:
    return time.time_ns() // 1000


async def snapshot(client: Client) -> Snapshot:
    """Get the last entry of every key, all at one moment (ADR-31)."""
    seq = (await client.jetstream().stream_info(STREAM)).state.last_seq
    before, values = now(), {}
    answers = await client.subscribe(inbox := client.new_inbox())
    request = {"multi_last": [f"$KV.{BUCKET}.>"], "batch": 1000}
    await client.publish(f"$JS.API.DIRECT.GET.{STREAM}", json.dumps(request).encode(), reply=inbox)
    while (headers := (message := await answers.next_msg(timeout=60)).headers or {}).get("Status") is None:
        if not {"KV-Operation", "Nats-Marker-Reason"} & headers.keys():
            values[headers["Nats-Subject"].split(".", 2)[2]] = (int(headers["Nats-Sequence"]), message.data)
    assert headers["Status"] == "204", headers
    await answers.unsubscribe()
    return Snapshot(seq, before, now(), values)


async def use(url: str, seed: int) -> tuple[list[Entry], list[Snapshot]]:
    """Use the bucket while it is captured; the entries, as a subscriber saw them, and what it held now and then."""
    choose, entries, snapshots = random.Random(seed), list[Entry](), list[Snapshot]()
    moments = set(random.Random(seed + 1).sample(range(REVISIONS // AT_ONCE), SNAPSHOTS))

    async def note(message: Msg) -> None:
        entries.append(entry(message))

    async with connection(url) as client:
        stream = client.jetstream()

        async def delivered(seq: int) -> None:
            async def has() -> bool:
                with contextlib.suppress(NotFoundError):  # until the capture has created its consumer
                    captured = (await stream.consumer_info(STREAM, "archive")).delivered.stream_seq
                    return bool(min(captured, entries[-1].seq if entries else 0) >= seq)
                return False

            await until(has, f"revision {seq} is delivered to the capture")

        watching = ConsumerConfig(ack_policy=AckPolicy.NONE)
        await stream.subscribe(f"$KV.{BUCKET}.>", cb=note, config=watching, manual_ack=True)
        await delivered(0)  # or the first entries expire before the capture has a consumer
        for batch in range(REVISIONS // AT_ONCE):
            for key, value, headers in changes(choose, batch):
                await stream.publish(f"$KV.{BUCKET}.{key}", value, headers=headers or None)
            await delivered((await stream.publish(f"$KV.{BUCKET}.last", b'{"n": 0}')).seq)
            if batch in moments:
                snapshots.append(await snapshot(client))

        async def settled() -> bool:
            last = await snapshot(client)
            return last.values == held(entries, last.after, HISTORY)

        await until(settled, "the server holds what its rules say, once all short TTLs are over")
        await delivered(entries[-1].seq)
    return entries, snapshots


def rows(archive: Path, *columns: str, **how: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read_bucket(str(archive), BUCKET, columns=columns, **how).read_all().to_pylist()
    return found


def values(archive: Path, as_of: AsOf | None = None) -> dict[str, tuple[int, bytes]]:
    found = rows(archive, "key_name", "revision", "_nats_payload", as_of=as_of)
    by_key = {row["key_name"]: (row["revision"], row["_nats_payload"] or b"") for row in found}
    assert len(by_key) == len(found)
    return by_key


@pytest.mark.exhaustive
def test_a_bucket_reads_as_it_was_at_any_revision(nats_server: Callable[..., NatsServer], tmp_path: Path) -> None:
    server, archive = nats_server(), tmp_path / "archive"
    asyncio.run(ask(server.url, f"STREAM.CREATE.{STREAM}", BUCKET_CONFIG))
    sections: dict[str, Any] = {"decode": {"format": "json"}, "block": {"interval": "1h", "max_age": "3s"}}
    found = settings(server.url, archive, **sections) | {"source": {"bucket": BUCKET, "consumer": "archive"}}
    del found["key"]  # the default of buckets
    with Command(tmp_path, found).start() as command:
        entries, snapshots = asyncio.run(use(server.url, 20261122))
        command.drain()
    times = {each.seq: each.time for each in entries}
    assert len(entries) >= REVISIONS
    assert len(snapshots) == SNAPSHOTS

    history = rows(archive, "revision", "operation", history=True, as_of=entries[-1].seq)  # later ones are markers
    kinds = {row["revision"]: row["operation"] for row in history}
    assert set(kinds.values()) == {"put", "delete", "purge", "expire"}
    assert kinds.keys() == times.keys()

    compared = 0
    for index, each in enumerate(snapshots):
        by_revision = values(archive, each.seq)
        assert by_revision == held((e for e in entries if e.seq <= each.seq), times[each.seq], HISTORY)
        if index % 5 == 0:
            assert values(archive, moment_of(each.before)) == held(entries, each.before, HISTORY)
        unsure = {e.key for e in entries if e.ends is not None and times[each.seq] - LAG < e.ends < each.after + SECOND}
        sure = {key for key in (by_revision | each.values) if key not in unsure}
        assert {key: by_revision.get(key) for key in sure} == {key: each.values.get(key) for key in sure}
        compared += len(sure)
    assert compared > SNAPSHOTS * KEYS // 4
    last = values(archive)
    assert last == held(entries, now(), HISTORY)
    newest = {e.key: e.seq for e in entries}
    assert any(newest[key] != revision for key, (revision, _) in last.items())  # older ones show when newer ones expire
    decoded = rows(archive, "n", "_nats_payload")
    assert all((row["n"] is None) == (row["_nats_payload"] or b"").startswith(b"not JSON") for row in decoded)
