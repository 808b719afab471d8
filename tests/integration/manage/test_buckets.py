"""The commands understand `source.bucket` and `source.object_store`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from jetcapture_py.config.model import NatsConfig, parse, parse_for_apply
from jetcapture_py.errors import SourceError
from jetcapture_py.manage.apply import run as apply
from jetcapture_py.manage.check import check
from jetcapture_py.manage.export import export
from jetcapture_py.manage.many import show_one
from jetcapture_py.manage.objects import listed
from jetcapture_py.manage.tap import tap
from jetcapture_py.reading.selection import Selection
from jetcapture_py.verify.proof import verify
from tests.integration.manage.api import ask_with
from tests.support.nats_server import NatsServer
from tests.support.running import capture_all, connection, rows


def sections(server: NatsServer, archive: Path | None = None, **more: Any) -> dict[str, Any]:
    store = {} if archive is None else {"store": {"url": str(archive)}}
    source = {"bucket": "settings", "consumer": "archive"}
    return {"nats": {"servers": [server.url]}, "source": source, **store, **more}


async def use(url: str) -> None:
    """Create a bucket, put, delete and purge, and put what is not JSON."""
    async with connection(url) as client:
        bucket = await client.jetstream().create_key_value(bucket="settings", history=3)
        await bucket.put("auth.user", b'{"name": "ada", "operation": "none"}')
        await bucket.put("auth.user", b"?")
        await bucket.delete("auth.user")
        await bucket.purge("limits")


def test_a_missing_bucket_or_object_store_is_created_as_clients_create_it(server: NatsServer) -> None:
    managed = parse_for_apply(sections(server, stream={"max_msgs_per_subject": 5}))
    assert [show_one(apply(managed, dry_run=dry_run)) for dry_run in (False, True)] == [0, 0]
    files = {"stream": {"max_age": "7d"}, "source": {"object_store": "files", "consumer": "archive"}}
    assert show_one(apply(parse_for_apply(sections(server, **files)), dry_run=False)) == 0

    async def use_them() -> list[dict[str, Any]]:
        async with connection(server.url) as client:
            stream = client.jetstream()
            bucket = await stream.key_value("settings")
            assert await bucket.put("a.b", b"1") == 1
            await bucket.purge("a.b")
            await stream.create_key_value(bucket="other", history=5)
            store = await stream.object_store("files")
            await store.put("a", b"1")
            await store.put("a", b"22")
            assert (await store.get("a")).data == b"22"
            return [(await ask_with(client, f"STREAM.INFO.KV_{name}"))["config"] for name in ("settings", "other")]

    ours, theirs = asyncio.run(use_them())
    for name in ("discard", "allow_rollup_hdrs", "deny_delete", "max_msgs_per_subject", "retention", "deny_purge"):
        assert ours.get(name) == theirs.get(name), name
    assert ours["subjects"] == ["$KV.settings.>"]


def test_an_export_names_the_bucket_and_applies_without_a_change(server: NatsServer, archive: Path) -> None:
    asyncio.run(use(server.url))
    asyncio.run(capture_all(parse(sections(server, archive))))
    found = asyncio.run(export(NatsConfig(servers=(server.url,)), "KV_settings", "archive"))
    assert found["source"]["bucket"] == "settings"
    assert "stream" not in found["source"]
    managed = parse_for_apply(yaml.safe_load(yaml.safe_dump(found)))
    assert show_one(apply(managed, dry_run=True)) == 0


async def test_tap_objects_and_verify_work_on_a_bucket(server: NatsServer, archive: Path) -> None:
    await use(server.url)
    config = parse(sections(server, archive, decode={"format": "json"}))
    tapped = await tap(config, 10)
    assert [(each.rows, each.quarantine and each.quarantine[0]) for each in tapped] == [
        ([{"key_name": "auth.user", "operation": "put", "revision": 1, "name": "ada", "operation_": "none"}], None),
        ([], "decode"),
        ([{"key_name": "auth.user", "operation": "delete", "revision": 3, "name": None, "operation_": None}], None),
        ([{"key_name": "limits", "operation": "purge", "revision": 4, "name": None, "operation_": None}], None),
    ]
    await capture_all(config)
    stored = [{name: row[name] for name in tapped[0].rows[0]} for row in rows(archive)]
    assert stored == [each.rows[0] for each in tapped if each.rows]
    assert [(name.stream, name.key, name.quarantine) for name, _ in listed(config, Selection())] == [
        ("KV_settings", None, False),
        ("KV_settings", None, True),
    ]
    report = await verify(config)
    assert report.exit_code(strict=False) == 0
    assert report.as_text().startswith("complete: every one of 4 messages")


async def test_check_warns_of_a_bucket_without_history_and_a_capture_names_the_setting_of_a_missing_one(
    server: NatsServer, archive: Path
) -> None:
    await use(server.url)
    config = parse(sections(server, archive))
    found = await check(config)
    assert found.problems == []
    (about,) = [each for each in found.items if each.about == "bucket"]
    assert (about.level, about.text) == ("ok", "it keeps 3 entries per key")
    async with connection(server.url) as client:
        await client.jetstream().delete_key_value("settings")
        await client.jetstream().create_key_value(bucket="settings")
    (warning,) = [each for each in (await check(config)).items if each.about == "bucket"]
    assert warning.level == "warning"
    assert warning.text.startswith("it keeps one entry per key: ")
    missing = parse(sections(server, archive, source={"bucket": "nothing", "consumer": "archive"}))
    with pytest.raises(SourceError, match=r"stream KV_nothing does not exist; create it, or correct source\.bucket"):
        await capture_all(missing)
