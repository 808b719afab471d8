"""`jetcapture objects` lists what the archive holds, by key and time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from jetcapture_py.archive.bundles import bundle_of
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.config.model import Config
from jetcapture_py.manage.many import show_one
from jetcapture_py.manage.objects import listed, run
from jetcapture_py.reading.selection import Selection
from tests.support.archives import lay_out
from tests.support.nats_server import NatsServer
from tests.support.running import STREAM, capture_all, config, objects, publish


@pytest.fixture
def configuration(nats_server: Callable[..., NatsServer], tmp_path: Path) -> Config:
    """A capture with the keys eu and us, one message without a key, and a quarantine."""
    server = nats_server()
    messages = [("orders", b'{"region": "%s"}' % region, None) for region in (b"eu", b"us", b"eu")]
    messages += [("orders", b"{}", None), ("orders", b"{broken", None)]
    asyncio.run(publish(server.url, messages, subjects=["orders"]))
    decode = {"format": "json", "columns": {"region": "string"}}
    found = config(server.url, tmp_path / "archive", decode=decode, key="{region}", block={"interval": "1h"})
    asyncio.run(capture_all(found))
    return found


def test_every_object_is_listed_by_key_and_the_quarantine_last_and_keys_are_selected(configuration: Config) -> None:
    found = listed(configuration, Selection())
    assert {name for name, _ in found} == set(objects(Path(configuration.store.url)))
    assert [(name.key, name.quarantine) for name, _ in found] == [
        ("eu", False),
        ("us", False),
        (None, False),
        (None, True),
    ]
    selected = [name for name, _ in listed(configuration, Selection.of(keys=["us", ""]))]
    assert [(name.key, name.quarantine) for name in selected] == [("us", False), (None, False)]


def test_keys_select_the_objects_of_their_bundles_whatever_the_number_of_bundles(tmp_path: Path) -> None:
    messages = {(seq, seq): key for seq, key in enumerate(["eu", "us", "apac", None, *map(str, range(40))], 1)}
    four, eight = lay_out(tmp_path, messages, 4), lay_out(tmp_path, messages, 8, bucket=1_700_001_000)
    keyed = lay_out(tmp_path, messages, 0, bucket=1_700_001_900)
    found = listed(config("nats://127.0.0.1:1", tmp_path), Selection.of(keys=["eu", ""]))
    expected = {name for name in four if name.bundle in (bundle_of("eu", 4), bundle_of(None, 4))}
    expected |= {name for name in eight if name.bundle in (bundle_of("eu", 8), bundle_of(None, 8))}
    expected |= {name for name in keyed if name.key in ("eu", None)}
    assert {name for name, _ in found} == expected
    everything = listed(config("nats://127.0.0.1:1", tmp_path), Selection())
    assert {name for name, _ in everything} == {*four, *eight, *keyed}


def test_the_list_names_bundles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (name,) = lay_out(tmp_path, {(1, 1): "eu"}, 16)
    settings = config("nats://127.0.0.1:1", tmp_path)
    assert show_one(run(settings, Selection()), as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["key"], found["bundle"], found["path"]) == (None, bundle_of("eu", 16), name.path)
    assert show_one(run(settings, Selection())) == 0
    assert f"(bundle {name.bundle})" in capsys.readouterr().out


def test_times_select_buckets_that_reach_into_them() -> None:
    name = ObjectName(
        stream=STREAM, key=None, bucket=3600, first_seq=1, last_seq=1, rows=1, digest="0" * 16, quarantine=False
    )
    start = datetime.fromtimestamp(3600, UTC)
    second = timedelta(seconds=1)
    assert Selection(event_start=start + timedelta(hours=1) - second).may_hold_name(name, 3600)
    assert not Selection(event_start=start + timedelta(hours=1)).may_hold_name(name, 3600)
    assert Selection(event_end=start + second).may_hold_name(name, 3600)
    assert not Selection(event_end=start).may_hold_name(name, 3600)


def test_json_has_one_object_per_line_and_text_a_sum(configuration: Config, capsys: pytest.CaptureFixture[str]) -> None:
    assert show_one(run(configuration, Selection()), as_json=True) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["key"], each["rows"]) for each in found] == [("eu", 2), ("us", 1), (None, 1), (None, 1)]
    for each in found:
        assert (Path(configuration.store.url) / each["path"]).stat().st_size == each["bytes"]
    assert show_one(run(configuration, Selection())) == 0
    text = capsys.readouterr().out.splitlines()
    assert text[0].split() == ["key", "time", "slice", "first", "last", "rows", "bytes", "path"]
    assert text[-1].startswith("4 objects, 5 rows, ")
    assert show_one(run(configuration, Selection.of(keys=["none"]))) == 0
    assert capsys.readouterr().out == "0 objects, 0 rows, 0 B\n"
