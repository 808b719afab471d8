"""Keys in real captures: copies of a message lie under one key, and a changed rule for keys is said."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.capture.parts import describe_key
from jetcapture_py.capture.pipeline import Capture
from jetcapture_py.config.block import MANY_KEYS
from jetcapture_py.errors import ConfigError
from jetcapture_py.transform.batch import MessageBatch
from tests.support.nats_server import NatsServer
from tests.support.running import Message, capture_all, config, objects, publish, running, until
from tests.support.stores import ThenStore, crash


def of(*payloads: bytes) -> list[Message]:
    return [("orders.eu", payload, None) for payload in payloads]


async def test_copies_of_a_message_lie_under_one_key_whatever_was_decoded_before_them(
    server: NatsServer, archive: Path
) -> None:
    settings = config(server.url, archive, decode={"format": "json"}, key="{id}", store={"retry_for": "0s"})
    await publish(server.url, of(b'{"id":12345678901}', b'{"id":1.0}', b'{"id":1}', b'{"id":true}'))
    with pytest.raises(BaseExceptionGroup):
        await capture_all(settings, store=ThenStore(settings, crash))
    assert objects(archive), "nothing was stored before the crash"
    await publish(server.url, of(b'{"id":0.5}', b'{"ID":7}', b'{"id":"text"}', b'{"id":{"a":1}}'))
    await capture_all(settings)
    keys: dict[int, set[str | None]] = defaultdict(set)
    for name in objects(archive):
        for seq in pq.ParquetFile(archive / name.path).read([layout.SEQ]).column(0).to_pylist():
            keys[seq].add(name.key)
    texts = ("12345678901", "1.0", "1", "true", "0.5", None, "text", None)
    assert keys == {seq: {text} for seq, text in enumerate(texts, 1)}


def own_key(batch: MessageBatch, fields: pa.RecordBatch) -> pa.StringArray:
    return batch.column(layout.SUBJECT)


async def test_a_changed_rule_for_keys_or_another_interval_is_said_at_the_start_and_an_unchanged_one_is_not(
    server: NatsServer, archive: Path, logged: Any
) -> None:
    said = 0

    async def capture(key: str = "{id}", interval: str = "15m", **block: Any) -> list[dict[str, Any]]:
        """The fields of what is said of changed rules, but those that are always the same."""
        nonlocal said
        await publish(server.url, of(b'{"id":1}'))
        block = {"interval": interval, **block}
        await capture_all(config(server.url, archive, decode={"format": "json"}, key=key, block=block))
        found = logged("rule.changed")[said:]
        said += len(found)
        assert all('dedupe="full"' in each["advice"] for each in found)
        return [
            {name: each[name] for name in each if name.startswith(("key", "interval", "time_", "time"))}
            for each in found
        ]

    own = "tests.integration.capture.test_keys:own_key"
    event_time = {"time": "header.X-At", "time_unit": "ms", "time_fallback": "timestamp"}
    assert await capture() == await capture() == []
    changed = {"key_before": "{id} (fields as sent)", "key": "a-{id} (fields as sent)"}
    assert await capture("a-{id}") == [changed]
    assert await capture("a-{id}", "1h") == [{"interval_before": "15m", "interval": "1h"}]
    changed = {"key_before": "a-{id} (fields as sent)", "key": own, "interval_before": "1h", "interval": "1d"}
    assert await capture(own, "1d") == [changed]
    changed = {"time_before": "timestamp", "time": "header.X-At in ms, else timestamp"}
    assert await capture(own, "1d", **event_time) == [changed]
    assert await capture(own, "1d", **event_time) == []
    with_function = Capture(config(server.url, archive), key=own_key)
    assert with_function.archiver.encoding.encoder.key_rule == own
    (archive / "_watermark" / "ORDERS" / "archive.json").write_text("damaged")
    assert await capture() == [], "the watermark cannot be read"


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


def test_a_url_with_the_key_cannot_be_combined_with_bundles(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"store.url: cannot contain \{key\} with block.bundles"):
        config("nats://127.0.0.1:4222", f"{tmp_path}/{{key}}", block={"bundles": 4})


async def test_a_capture_with_many_open_keys_and_no_bundles_says_so_once(
    server: NatsServer, archive: Path, logged: Any
) -> None:
    many = MANY_KEYS + 1
    await publish(server.url, [(f"orders.x.{number}", b"x", None) for number in range(many)])
    async with running(config(server.url, archive, key="{subject[2]}")):
        await until(lambda: bool(logged("keys.many")), "it is said")
    (said,) = logged("keys.many")
    assert (said["open_keys"], said["advice"]) == (many, "set block.bundles, or use a coarser key")
