"""`jetcapture columns` writes the columns that messages suggest, as `decode.columns` has them."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from jetcapture_py.errors import ConfigError
from jetcapture_py.manage.columns import run
from tests.support.nats_server import NatsServer
from tests.support.running import capture_all, config, publish

SENT = [
    *[
        {"id": number, "price": number / 2, "city": {"zip": "1"}, "tags": ["a"], "a b": True, "on": 1}
        for number in range(8)
    ],
    {"id": "n/a", "price": 1, "city": {"zip": 7}, "odd": {"x y": 1}},
    {"id": 9, "price": 1},
]
EXPECTED = {
    "id": "int64",
    "price": "double",
    "city": "struct<zip: string>",
    "tags": "list<string>",
    "a b": "bool",
    "on": "int64",
}


async def test_the_columns_of_the_newest_messages_and_of_the_archive_are_ready_to_paste(
    server: NatsServer, archive: Path
) -> None:
    await publish(server.url, [("orders.eu", json.dumps(document).encode(), None) for document in SENT])
    configuration = config(server.url, archive, key="{id}")
    for start in (None, datetime(2000, 1, 1, tzinfo=UTC)):
        lines = list(map(str, (await asyncio.to_thread(run, configuration, start)).lines))
        decode = yaml.safe_load("\n".join(lines))["decode"]
        odd = decode["columns"].pop("odd")
        assert odd in ("json", "struct<x y: int64>")
        assert decode == {"format": "json", "columns": EXPECTED}
        config(server.url, archive, decode={**decode, "columns": {**decode["columns"], "odd": odd}})  # it is valid
        notes = {line.split(":")[0].strip(): line.partition("  # ")[2] for line in lines if "  # " in line}
        assert notes["id"] == '1 of 10 rows does not fit, such as "n/a"'
        assert notes["city"] == "1 of 10 rows does not fit, such as city.zip = 7; null in 1 of 10 rows"
        assert notes["tags"] == "null in 2 of 10 rows"
        if start is None:
            await capture_all(configuration)


async def test_messages_of_several_rows_are_decoded_once_from_the_archive(server: NatsServer, archive: Path) -> None:
    await publish(server.url, [("orders.eu", b'{"id": 1}\n{"id": 2}', None)])
    configuration = config(server.url, archive, decode={"format": "json", "rows": "lines"})
    await capture_all(configuration)
    result = await asyncio.to_thread(run, configuration, datetime(2000, 1, 1, tzinfo=UTC))
    assert list(map(str, result.lines)) == ["decode:", "  format: json", "  columns:", "    id: int64"]


async def test_formats_that_infer_nothing_are_refused(server: NatsServer, archive: Path) -> None:
    decode = {"format": "csv", "columns": {"id": "int64"}}
    with pytest.raises(ConfigError, match="expected raw, json or msgpack, whose columns are inferred, got csv"):
        run(config(server.url, archive, decode=decode), None)
