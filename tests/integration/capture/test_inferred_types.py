"""An inferred column keeps its type over restarts, and in every command; what does not fit is kept beside it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jetcapture_py import log, read_archive
from jetcapture_py.archive import layout
from jetcapture_py.config.model import Config
from jetcapture_py.manage import check, tap
from jetcapture_py.verify.proof import verify
from tests.support.nats_server import NatsServer
from tests.support.running import capture_all, config, objects, publish, rows

SETTINGS: dict[str, Any] = {"decode": {"format": "json"}, "key": ""}


async def send(configuration: Config, *documents: Any) -> None:
    payloads = [json.dumps(document).encode() for document in documents]
    await publish(configuration.nats.servers[0], [("orders.eu", payload, None) for payload in payloads])


async def capture(configuration: Config, *documents: Any) -> None:
    await send(configuration, *documents)
    await capture_all(configuration)


def types_of(archive: Path, column: str) -> set[pa.DataType]:
    """The types that objects have for a column."""
    schemas = [pq.read_schema(archive / name.path) for name in objects(archive)]
    return {schema.field(column).type for schema in schemas if column in schema.names}


def test_a_column_keeps_its_type_over_restarts(
    nats_server: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server: NatsServer = nats_server()
    caplog.set_level("INFO", "jetcapture.capture")
    archive = tmp_path / "archive"
    configuration = config(server.url, archive, **SETTINGS)
    asyncio.run(capture(configuration, {"id": 42, "price": 1}, {"id": 43, "price": 2}))
    asyncio.run(capture(configuration, {"price": 3}))  # the newest object has no id
    asyncio.run(capture(configuration, {"id": "n/a", "price": 2.5, "new": True}))
    stored = {row[layout.SEQ]: row for row in rows(archive)}
    assert types_of(archive, "id") == {pa.int64()}
    assert (stored[4]["id"], json.loads(stored[4][layout.RESCUED])) == (None, {"id": "n/a"})
    assert json.loads(stored[4][layout.PAYLOAD]) == {"id": "n/a", "price": 2.5, "new": True}
    assert [stored[seq]["price"] for seq in (1, 4)] == [1, 2.5]
    kept = json.loads((archive / "_columns" / "ORDERS" / f"{configuration.source.consumer}.json").read_text())
    assert kept["types"] == {"id": "int53", "price": "double", "new": "bool"}
    events = {record.msg: getattr(record, log.FIELDS) for record in caplog.records if record.msg.startswith("column.")}
    assert events["column.rescued"] == {"column": "id", "example": 'id = "n/a"', "seq": 4, "messages": 1}
    assert events["column.changed"] == {"column": "price", "was": "int64", "type": "double"}
    table = read_archive(str(archive), "ORDERS").read_all()
    assert (table["id"].type, sorted(table["id"].drop_null().to_pylist())) == (pa.int64(), [42, 43])


def test_commands_know_the_types_of_the_archive(nats_server: Any, tmp_path: Path) -> None:
    server: NatsServer = nats_server()
    configuration = config(server.url, tmp_path / "archive", **SETTINGS)
    asyncio.run(capture(configuration, {"id": 1}))
    asyncio.run(send(configuration, *[{"id": "text"}] * 3))
    (outcome,) = asyncio.run(tap.tap(configuration, 1))
    assert outcome.rows == [{layout.RESCUED: '{"id":"text"}'}]
    lines = "\n".join(map(str, check.run(configuration).lines))
    assert '3 rows of the newest 4 messages with values that do not fit, such as {"id":"text"}' in lines
    asyncio.run(capture_all(configuration))
    proof = asyncio.run(verify(configuration)).as_text()
    assert 'columns: 3 rows with values that did not fit, in _nats_rescued, such as {"id":"text"}\n' in proof


def test_a_damaged_file_of_types_is_replaced(
    nats_server: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server: NatsServer = nats_server()
    configuration = config(server.url, tmp_path / "archive", **SETTINGS)
    asyncio.run(capture(configuration, {"id": 1}))
    file = tmp_path / "archive" / "_columns" / "ORDERS" / f"{configuration.source.consumer}.json"
    file.write_bytes(b"{")
    asyncio.run(capture(configuration, {"id": "a"}))
    assert [record.msg for record in caplog.records].count("columns.failed") == 1
    assert json.loads(file.read_text())["types"] == {"id": "string"}
