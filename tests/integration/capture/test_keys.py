"""Keys in real captures: copies of a message lie under one key, and a changed rule for keys is said."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jetcapture_py import log
from jetcapture_py.archive import layout
from jetcapture_py.capture.parts import describe_key
from jetcapture_py.capture.pipeline import Capture
from jetcapture_py.transform.batch import MessageBatch
from tests.support.nats_server import NatsServer
from tests.support.running import Message, capture_all, config, objects, publish, publish_and_capture
from tests.support.stores import ThenStore, crash

Start = Callable[..., NatsServer]


def of(*payloads: bytes) -> list[Message]:
    return [("orders.eu", payload, None) for payload in payloads]


def keys_by_sequence(root: Path) -> dict[int, list[str | None]]:
    """The key of every copy of each message."""
    found: dict[int, list[str | None]] = defaultdict(list)
    for name in objects(root):
        with pa.memory_map(str(root / name.path)) as file:
            for seq in pq.read_table(file, columns=[layout.SEQ]).column(0).to_pylist():
                found[seq].append(name.key)
    return found


def test_copies_of_a_message_lie_under_one_key_whatever_was_decoded_before_them(
    nats_server: Start, tmp_path: Path
) -> None:
    server = nats_server()
    crashing = config(
        server.url, tmp_path / "archive", decode={"format": "json"}, key="{id}", store={"retry_for": "0s"}
    )
    settings = config(server.url, tmp_path / "archive", decode={"format": "json"}, key="{id}")
    asyncio.run(publish(server.url, of(b'{"id":12345678901}', b'{"id":1.0}', b'{"id":1}', b'{"id":true}')))
    with pytest.raises(BaseExceptionGroup):
        asyncio.run(capture_all(crashing, store=ThenStore(crashing, crash)))
    assert objects(tmp_path / "archive"), "nothing was stored before the crash"
    asyncio.run(publish(server.url, of(b'{"id":0.5}', b'{"ID":7}', b'{"id":"text"}', b'{"id":{"a":1}}')))
    asyncio.run(capture_all(settings))
    found = keys_by_sequence(tmp_path / "archive")
    assert {seq: set(keys) for seq, keys in found.items()} == {
        1: {"12345678901"},
        2: {"1.0"},
        3: {"1"},
        4: {"true"},
        5: {"0.5"},
        6: {None},
        7: {"text"},
        8: {None},
    }


# ------------------------------------------------------------------ a changed rule


def own_key(batch: MessageBatch, fields: pa.RecordBatch) -> pa.StringArray:
    return batch.column(layout.SUBJECT)


def said(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of every warning that a rule has changed, but those that are always the same."""
    found = [getattr(record, log.FIELDS) for record in caplog.records if record.msg == "rule.changed"]
    for fields in found:
        assert 'dedupe="full"' in fields.pop("advice")
    caplog.clear()
    return found


def test_a_changed_rule_for_keys_or_another_interval_is_said_at_the_start_and_an_unchanged_one_is_not(
    nats_server: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "jetcapture")
    server = nats_server()

    def capture(key: str = "{id}", columns: dict[str, str] | None = None, **parts: Any) -> list[dict[str, Any]]:
        block = {"interval": parts.pop("interval", "15m"), **parts.pop("block", {})}
        decode = {"format": "json", "columns": columns or {}}
        asyncio.run(publish(server.url, of(b'{"id":1}')))
        settings = config(server.url, tmp_path / "archive", decode=decode, key=key, block=block)
        asyncio.run(capture_all(settings, **parts))
        return said(caplog)

    assert capture() == []
    assert capture() == []
    assert capture(key="a-{id}") == [{"key_before": "{id} (fields as sent)", "key": "a-{id} (fields as sent)"}]
    assert capture(key="a-{id}") == []
    assert capture(key="a-{id}", interval="1h") == [{"interval_before": "15m", "interval": "1h"}]
    assert capture(key="a-{id}", columns={"id": "int64"}, interval="1d") == [
        {
            "key_before": "a-{id} (fields as sent)",
            "key": "a-{id} (id: int64)",
            "interval_before": "1h",
            "interval": "1d",
        }
    ]
    assert capture(key="", interval="1d") == [{"key_before": "a-{id} (id: int64)", "key": ""}]
    own = {"key": "tests.integration.capture.test_keys:own_key", "interval": "1d"}
    assert capture(**own) == [{"key_before": "", "key": "tests.integration.capture.test_keys:own_key"}]
    own["block"] = {"time": "header.X-At", "time_unit": "ms", "time_fallback": "timestamp"}
    assert capture(**own) == [{"time_before": "timestamp", "time": "header.X-At in ms, else timestamp"}]
    assert capture(**own) == []
    with_function = Capture(config(server.url, tmp_path / "archive"), key=own_key)
    assert with_function.archiver.encoding.encoder.key_rule == "tests.integration.capture.test_keys:own_key"


def test_a_start_is_silent_where_the_watermark_cannot_be_read(
    nats_server: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "jetcapture")
    server, root = nats_server(), tmp_path / "archive"

    def capture(**parts: Any) -> None:
        asyncio.run(publish(server.url, of(b"x")))
        asyncio.run(capture_all(config(server.url, root, key=""), **parts))

    publish_and_capture(server.url, root, of(b"x"))
    caplog.clear()
    (root / "_watermark" / "ORDERS" / "archive.json").write_text("damaged")
    capture()
    assert said(caplog) == []
    assert {record.msg for record in caplog.records} <= {"blocks.stored", "watermark.failed"}


def test_the_rule_names_what_keys_depend_on(tmp_path: Path) -> None:
    columns = {"at": {"type": "timestamp", "unit": "ms", "path": "x.y"}, "a": "json"}
    for key, decode, rule in (
        ("{subject}", {}, "{subject}"),
        ("{id}", {}, "{id} (fields of raw)"),
        ("{id}", {"format": "own:decoder"}, "{id} (fields of own:decoder)"),
        ("{id}-{key}", {"format": "json"}, "{id}-{key} (fields as sent)"),
        ("{id}", {"format": "json", "columns": {"id": "int"}}, "{id} (id: int64)"),
        ("{key}-{x}", {"format": "json", "columns": {"key": "str"}}, "{key}-{x} (key: string, x: none)"),
        (
            "{at}/{a.b}",
            {"format": "json", "columns": columns},
            "{at}/{a.b} (at: timestamp[us, tz=UTC] in ms at x.y, a.b: string)",
        ),
    ):
        settings = config("nats://127.0.0.1:4222", tmp_path, key=key, decode=decode)
        assert describe_key(settings.key, settings.decode, None, None) == rule
