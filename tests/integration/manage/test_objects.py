"""`jetcapture objects` lists what the archive holds, by key and time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jetcapture_py.manage.many import show_one
from jetcapture_py.manage.objects import listed, run
from jetcapture_py.reading.selection import Selection
from tests.support.archives import lay_out
from tests.support.nats_server import NatsServer
from tests.support.running import config, objects, publish_and_capture


def test_objects_are_listed_by_key_with_the_quarantine_last_as_text_and_as_json(
    server: NatsServer, archive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [("orders.a", b'{"region": "%s"}' % region, None) for region in (b"eu", b"us", b"eu")]
    messages += [("orders.a", b"{}", None), ("orders.a", b"{broken", None)]
    decode = {"format": "json", "columns": {"region": "string"}}
    block = {"interval": "1h"}
    configuration = publish_and_capture(server.url, archive, messages, decode=decode, key="{region}", block=block)
    assert {name for name, _ in listed(configuration, Selection())} == set(objects(archive))
    assert show_one(run(configuration, Selection()), as_json=True) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    expected = [("eu", 2, False), ("us", 1, False), (None, 1, False), (None, 1, True)]
    assert [(each["key"], each["rows"], each["quarantine"]) for each in found] == expected
    for each in found:
        assert (archive / each["path"]).stat().st_size == each["bytes"]
    selected = [name for name, _ in listed(configuration, Selection.of(keys=["us", ""]))]
    assert [(name.key, name.quarantine) for name in selected] == [("us", False), (None, False)]
    assert show_one(run(configuration, Selection())) == 0
    text = capsys.readouterr().out.splitlines()
    assert text[0].split() == ["key", "time", "slice", "first", "last", "rows", "bytes", "path"]
    assert text[-1].startswith("4 objects, 5 rows, ")
    assert show_one(run(configuration, Selection.of(keys=["none"]))) == 0
    assert capsys.readouterr().out == "0 objects, 0 rows, 0 B\n"


def test_the_list_names_bundles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (name,) = lay_out(tmp_path, {(1, 1): "eu"}, 16)
    assert show_one(run(config("nats://127.0.0.1:1", tmp_path), Selection.of(keys=["eu"]))) == 0
    assert f"(bundle {name.bundle})" in capsys.readouterr().out
