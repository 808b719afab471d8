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

from jetcapture_py import layout
from jetcapture_py.errors import ConfigError
from tests.support.nats_server import NatsServer
from tests.support.running import Message, capture_all, config, objects, publish

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


class CrashError(Exception):
    """Ends a capture after its objects are stored and before their messages are acknowledged."""


async def crash(*_: Any) -> None:
    raise CrashError


def test_copies_of_a_message_lie_under_one_key_whatever_was_decoded_before_them(
    nats_server: Start, tmp_path: Path
) -> None:
    server = nats_server()
    settings = config(server.url, tmp_path / "archive", decode={"format": "json"}, key="{id}")
    asyncio.run(publish(server.url, of(b'{"id":12345678901}', b'{"id":1.0}', b'{"id":1}', b'{"id":true}')))
    with pytest.raises(BaseExceptionGroup):
        asyncio.run(capture_all(settings, on_stored=crash))
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


@pytest.mark.parametrize("key", ["a\ud800", "{subject}\udfff", "{\ud800}"])
def test_a_template_that_is_no_text_is_refused_instead_of_quarantining_every_message(
    nats_server: Start, tmp_path: Path, key: str
) -> None:
    server = nats_server()
    asyncio.run(publish(server.url, of(b"a")))
    with pytest.raises(ConfigError) as caught:
        asyncio.run(capture_all(config(server.url, tmp_path / "archive", key=key)))
    (problem,) = caught.value.problems
    assert problem.startswith("key: ")
    assert problem.isprintable()
