"""Decoders and key functions of the user's own that misbehave, in a real capture: each message fails alone."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from jetcapture_py import layout, log
from jetcapture_py.batch import Decoded, Failure, MessageBatch
from tests.support.nats_server import NatsServer
from tests.support.running import capture_all, config, publish, rows

Start = Callable[..., NatsServer]

SECRET = "pw-Hn4kq9-x"


def all_of(batch: MessageBatch) -> Decoded:
    """Every message, with its length as the column `size`."""
    return Decoded(
        fields=pa.RecordBatch.from_pydict(
            {"size": pa.array([len(payload) for payload in batch.column(layout.PAYLOAD).to_pylist()], pa.int64())}
        )
    )


class Leaky:
    """Raises for some messages and fails others, and quotes an address with a password in it."""

    def decode(self, batch: MessageBatch) -> Decoded:
        payloads = batch.column(layout.PAYLOAD).to_pylist()
        if b"raise" in payloads:
            raise ConnectionError(f"cannot reach\nhttp://app:{SECRET}@registry/schemas/1 {'x' * 10_000}")
        failures = tuple(
            Failure(
                index=index, stage="decode", error=f"\x1b[2J\nGET nats://{SECRET}@h password={SECRET} {'y' * 10_000}"
            )
            for index, payload in enumerate(payloads)
            if payload == b"fail"
        )
        kept = pa.array([index for index, payload in enumerate(payloads) if payload != b"fail"], pa.int32())
        return Decoded(
            fields=pa.RecordBatch.from_pydict({"one": pa.nulls(len(kept))}), messages=kept, failures=failures
        )


def leaky_key(batch: MessageBatch, fields: pa.RecordBatch) -> pa.StringArray:
    subjects = batch.column(layout.SUBJECT)
    if "orders.bad" in subjects.to_pylist():
        raise LookupError(f"no tenant at redis://:{SECRET}@cache:6379/0?token={SECRET}")
    return subjects


def test_errors_of_user_code_are_stored_and_logged_as_one_short_line_without_credentials(
    nats_server: Start, tmp_path: Path
) -> None:
    said = io.StringIO()
    log.setup("text", "debug", said)
    server = nats_server()
    messages = [("orders.eu", payload, None) for payload in (b"a", b"raise", b"b", b"fail", b"c")]
    asyncio.run(publish(server.url, [*messages, ("orders.bad", b"d", None), ("orders.eu", b"e", None)]))
    asyncio.run(capture_all(config(server.url, tmp_path / "archive"), decoder=Leaky(), key=leaky_key))
    assert [row[layout.PAYLOAD] for row in rows(tmp_path / "archive")] == [b"a", b"b", b"c", b"e"]
    bad = rows(tmp_path / "archive", quarantine=True)
    assert [(row[layout.PAYLOAD], row["stage"]) for row in bad] == [
        (b"raise", "decode"),
        (b"fail", "decode"),
        (b"d", "key"),
    ]
    for row in bad:
        assert SECRET not in row["error"]
        assert row["error"].isprintable()
        assert len(row["error"]) <= 300
    assert "http://***@registry/schemas/1" in bad[0]["error"]
    assert "messages.quarantined" in said.getvalue()
    assert SECRET not in said.getvalue()
    assert all(line.isprintable() and len(line) < 5000 for line in said.getvalue().splitlines())
