"""The commands understand `source.bucket` and `source.object_store`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from jetcapture_py.config.model import Config, NatsConfig, parse, parse_for_apply
from jetcapture_py.errors import SourceError
from jetcapture_py.manage.apply import run as apply
from jetcapture_py.manage.check import check
from jetcapture_py.manage.export import export
from jetcapture_py.manage.many import show_one
from jetcapture_py.manage.objects import listed
from jetcapture_py.manage.tap import tap
from jetcapture_py.reading.selection import Selection
from jetcapture_py.verify.proof import verify
from tests.integration.manage.api import ask
from tests.support.nats_server import NatsServer
from tests.support.running import capture_all, connection, rows

Start = Callable[..., NatsServer]


def capture(server: NatsServer, archive: Path, **sections: Any) -> Config:
    source = {"bucket": "settings", "consumer": "archive"}
    return parse({"nats": {"servers": [server.url]}, "source": source, "store": {"url": str(archive)}, **sections})


async def use(url: str) -> None:
    """Create a bucket, put, delete and purge, and put what is not JSON."""
    async with connection(url) as client:
        bucket = await client.jetstream().create_key_value(bucket="settings", history=3)
        await bucket.put("auth.user", b'{"name": "ada", "operation": "none"}')
        await bucket.put("auth.user", b"?")
        await bucket.delete("auth.user")
        await bucket.purge("limits")


def test_a_missing_bucket_is_created_as_clients_create_it(nats_server: Start) -> None:
    server = nats_server()
    managed = parse_for_apply(
        {
            "nats": {"servers": [server.url]},
            "stream": {"max_msgs_per_subject": 5},
            "source": {"bucket": "settings", "consumer": "archive"},
        }
    )
    assert show_one(apply(managed, dry_run=False)) == 0
    assert show_one(apply(managed, dry_run=True)) == 0

    async def compare() -> tuple[dict[str, Any], dict[str, Any]]:
        async with connection(server.url) as client:
            stream = client.jetstream()
            bucket = await stream.key_value("settings")
            assert await bucket.put("a.b", b"1") == 1
            await bucket.purge("a.b")
            await stream.create_key_value(bucket="other", history=5)
        ours, theirs = [(await ask(server.url, f"STREAM.INFO.KV_{name}"))["config"] for name in ("settings", "other")]
        return ours, theirs

    ours, theirs = asyncio.run(compare())
    chosen = ("discard", "allow_rollup_hdrs", "deny_delete", "max_msgs_per_subject", "retention", "deny_purge")
    assert {name: ours.get(name) for name in chosen} == {name: theirs.get(name) for name in chosen}
    assert ours["subjects"] == ["$KV.settings.>"]


def test_a_missing_object_store_is_created_as_clients_create_it(nats_server: Start) -> None:
    server = nats_server()
    sections = {"stream": {"max_age": "7d"}, "source": {"object_store": "files", "consumer": "archive"}}
    managed = parse_for_apply({"nats": {"servers": [server.url]}, **sections})
    assert show_one(apply(managed, dry_run=False)) == 0

    async def put() -> bytes:
        async with connection(server.url) as client:
            store = await client.jetstream().object_store("files")
            await store.put("a", b"1")
            await store.put("a", b"22")
            return (await store.get("a")).data or b""

    assert asyncio.run(put()) == b"22"


def test_an_export_names_the_bucket_and_applies_without_a_change(nats_server: Start, tmp_path: Path) -> None:
    server = nats_server()
    asyncio.run(use(server.url))
    asyncio.run(capture_all(capture(server, tmp_path / "archive")))
    found = asyncio.run(export(NatsConfig(servers=(server.url,)), "KV_settings", "archive"))
    assert found["source"]["bucket"] == "settings"
    assert "stream" not in found["source"]
    managed = parse_for_apply(yaml.safe_load(yaml.safe_dump(found)))
    assert show_one(apply(managed, dry_run=True)) == 0


def test_tap_objects_and_verify_work_on_a_bucket(nats_server: Start, tmp_path: Path) -> None:
    server = nats_server()
    asyncio.run(use(server.url))
    config = capture(server, tmp_path / "archive", decode={"format": "json"})
    tapped = asyncio.run(tap(config, 10))
    assert [(each.rows, each.quarantine and each.quarantine[0]) for each in tapped] == [
        ([{"key_name": "auth.user", "operation": "put", "revision": 1, "name": "ada", "operation_": "none"}], None),
        ([], "decode"),
        ([{"key_name": "auth.user", "operation": "delete", "revision": 3, "name": None, "operation_": None}], None),
        ([{"key_name": "limits", "operation": "purge", "revision": 4, "name": None, "operation_": None}], None),
    ]
    asyncio.run(capture_all(config))
    stored = [{name: row[name] for name in tapped[0].rows[0]} for row in rows(tmp_path / "archive")]
    assert stored == [each.rows[0] for each in tapped if each.rows]
    assert [(name.stream, name.key, name.quarantine) for name, _ in listed(config, Selection())] == [
        ("KV_settings", None, False),
        ("KV_settings", None, True),
    ]
    report = asyncio.run(verify(config))
    assert report.exit_code(strict=False) == 0
    assert report.as_text().startswith("complete: every one of 4 messages")


def test_check_warns_of_a_bucket_without_history_and_a_capture_names_the_setting_of_a_missing_one(
    nats_server: Start, tmp_path: Path
) -> None:
    server = nats_server()
    asyncio.run(use(server.url))
    config = capture(server, tmp_path / "archive")
    found = asyncio.run(check(config))
    assert found.problems == []
    assert [(each.level, each.text) for each in found.items if each.about == "bucket"] == [
        ("ok", "it keeps 3 entries per key")
    ]

    async def without_history() -> None:
        async with connection(server.url) as client:
            await client.jetstream().delete_key_value("settings")
            await client.jetstream().create_key_value(bucket="settings")

    asyncio.run(without_history())
    (warning,) = [each for each in asyncio.run(check(config)).items if each.about == "bucket"]
    assert warning.level == "warning"
    assert warning.text.startswith("it keeps one entry per key: ")
    missing = parse(
        {
            "nats": {"servers": [server.url]},
            "source": {"bucket": "nothing", "consumer": "archive"},
            "store": {"url": str(tmp_path / "archive")},
        }
    )
    with pytest.raises(SourceError, match=r"stream KV_nothing does not exist; create it, or correct source\.bucket"):
        asyncio.run(capture_all(missing))
