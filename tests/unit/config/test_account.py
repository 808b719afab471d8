"""A configuration of many streams: which ones it selects, what each capture's is, and what stays when they change."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml

from jetcapture_py.capture.parts import describe_key, preparer
from jetcapture_py.config.captures import AccountConfig, CaptureFiles, SelectedStreams, only
from jetcapture_py.config.model import parse
from jetcapture_py.errors import ConfigError, SourceError
from tests.support.batches import batch_of
from tests.support.running import settings

NO_FIELDS = pa.RecordBatch.from_arrays([], names=[])
ENV = {"NAME": "archive"}


def given(source: dict[str, Any], **sections: Any) -> dict[str, Any]:
    found = settings("nats://127.0.0.1:4222", "/archive", **sections)
    if "key" not in sections:
        del found["key"]
    return {**found, "source": {"consumer": "archive", **source}}


def account(source: dict[str, Any], **sections: Any) -> AccountConfig:
    found = AccountConfig.of(given(source, **sections), ENV, parse)
    assert found is not None
    return found


def test_patterns_select_streams_and_buckets_and_a_work_queue_only_by_its_name() -> None:
    streams = ("ORDERS", "orders-a", "orders-test", "$MQTT_sess", "KV_settings", "OBJ_files")
    for source, selected in (
        ({"streams": ["*"]}, ["ORDERS", "orders-a", "orders-test", "$MQTT_sess"]),
        ({"streams": ["orders-*", "!orders-test"]}, ["orders-a"]),
        ({"streams": ["!orders-*", "*"]}, ["ORDERS", "$MQTT_sess"]),
        ({"streams": ["ORDERS", "JOBS"]}, ["ORDERS", "JOBS"]),
        ({"streams": ["*", "JOBS", "!JOBS"]}, ["ORDERS", "orders-a", "orders-test", "$MQTT_sess"]),
        ({"streams": ["KV_settings"]}, ["KV_settings"]),
        ({"streams": ["KV_*"]}, []),
        ({"buckets": ["*"]}, ["KV_settings", "OBJ_files"]),
        ({"buckets": ["set*"]}, ["KV_settings"]),
        ({"streams": ["ORDERS"], "buckets": ["files"]}, ["ORDERS", "OBJ_files"]),
    ):
        file = account(source)
        found = [name for name in streams if file.selects(name)]
        found += [name for name in ("JOBS",) if file.selects(name, takes=True)]
        assert found == selected, source


def test_each_capture_has_the_settings_of_all_with_its_stream_in_place_of_the_placeholder() -> None:
    maintain = {"table": {"name": "nats.{stream}", "catalog": {"type": "sql", "uri": "sqlite://"}}}
    source = {"streams": ["*"], "buckets": ["*"], "consumer": "${NAME}-{stream}"}
    sections = {"key": "{stream}-{region}", "store": {"url": "/archive/{stream}"}, "maintain": maintain}
    file = account(source, decode={"format": "json"}, **sections)
    one = file.capture("ORDERS")
    assert (one.source.stream, one.source.consumer, one.source.streams) == ("ORDERS", "${NAME}-ORDERS", ())
    assert (one.key, one.store.url, one.decode.format) == ("{stream}-{region}", "/archive/ORDERS", "json")
    assert one.maintain is not None
    assert one.maintain.table is not None
    assert one.maintain.table.name == "nats.ORDERS"
    bucket, files = file.capture("KV_settings"), account({"buckets": ["*"]}, decode={"format": "json"}).capture("OBJ_f")
    assert (bucket.source.stream, bucket.source.bucket, bucket.decode.format) == ("KV_settings", "settings", "json")
    assert (files.source.object_store, files.decode.format, files.key) == ("f", "raw", "{subject[2]}")


STRANGE = ("operator:add", "a{subject}", "{key}", "{stream}", "a?b#c", "%2e", "${NAME}", "[x]", "~")
"""Names that NATS accepts, and that something could take for code, a template, an address or a variable."""


def test_a_streams_name_is_never_code_a_template_or_an_address() -> None:
    config = account({"streams": ["*"], "consumer": "c-{stream}"}, key="{stream}", on_stored={"subject": "x.{stream}"})
    table = {"name": "nats.t", "catalog": {"type": "sql"}}
    addresses = {
        "store.url": {"store": {"url": "/archive/{stream}"}},
        "maintain.table.name": {"maintain": {"table": {**table, "name": "nats.{stream}"}}},
        "maintain.table.location": {"maintain": {"table": {**table, "location": "s3://b/{stream}"}}},
    }
    for stream in STRANGE:
        one = config.capture(stream)
        rows = replace(batch_of([b"{}"]), stream=stream)
        assert preparer(one, None, None).key(rows, NO_FIELDS).to_pylist() == [stream]
        assert describe_key(one.key, one.decode, None, None) == "{stream}"
        assert (one.source.consumer, one.stored_subject) == (f"c-{stream}", f"x.{stream}")
        assert parse(given({"stream": "S", "consumer": stream}), ENV).source.consumer == stream
        refused = rf"cannot stand for .*{re.escape(stream)}.* give this stream a configuration of its own$"
        for setting, sections in addresses.items():
            with pytest.raises(ConfigError, match=rf"^{setting}: {{stream}} {refused}"):
                parse(given({"stream": stream}, **sections), ENV)
    config = account({"streams": ["*"]}, on_stored={"subject": "{stream}.API.STREAM.DELETE.X"})
    with pytest.raises(ConfigError, match=r"^on_stored.subject: expected a subject that is not the server's own"):
        config.capture("$JS")


def test_what_is_wrong_is_one_line_without_asking_a_server() -> None:
    table = {"name": "nats.all", "catalog": {"type": "sql"}}
    spool = {"path": "/spool", "size": "1GiB"}
    for source, sections, problem in (
        ({"streams": []}, {}, "source.streams: expected a name or a pattern without !"),
        ({"streams": ["!a"]}, {}, "source.streams: expected a name or a pattern without !"),
        ({"streams": ["*"], "stream": "A"}, {}, "source.streams: cannot be combined with stream"),
        ({"buckets": ["*"], "bucket": "A"}, {}, "source.buckets: cannot be combined with bucket"),
        ({"streams": "*"}, {}, "source.streams: expected a list, got text"),
        ({"streams": ["a.b"]}, {}, "source.streams[0]: expected a stream's name, or a pattern such as orders-* or "),
        ({"streams": ["*"], "max_streams": 0}, {}, "source.max_streams: expected at least 1, got 0"),
        ({"streams": ["*"], "ack_wiat": "1m"}, {}, "source.ack_wiat: unknown setting; did you mean ack_wait?"),
        ({"streams": ["*"]}, {"limits": {"spool": spool}}, "limits.spool: cannot be combined with source.streams"),
        ({"streams": ["*"]}, {"maintain": {"table": table}}, "maintain.table.name: expected {stream} in it: each"),
    ):
        with pytest.raises(ConfigError) as raised:
            account(source, **sections)
        (line,) = raised.value.problems
        assert line.startswith(problem)


def test_no_value_of_a_variable_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAME", "hunter2 ")
    for source in ({"streams": ["${NAME}"]}, {"streams": ["*"], "consumer": "{stream}${NAME}"}):
        with pytest.raises(ConfigError) as caught:
            CaptureFiles([written(tmp_path, source)])
        (line,) = caught.value.problems
        assert line.endswith('${NAME}"')
        assert "hunter2" not in line


def test_a_command_about_one_capture_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    path = written(tmp_path, {"streams": ["*"]})
    assert only(path, "ORDERS").source.stream == "ORDERS"
    problem = f"^{path}: stream _streams: source.stream: expected another name; the archive"
    with pytest.raises(ConfigError, match=problem):
        only(path, "_streams")
    with pytest.raises(ConfigError, match=r"^source.buckets: expected a configuration of one stream, or --stream"):
        parse(given({"buckets": ["*"]}), ENV)


class Server:
    """What a configuration finds."""

    def __init__(self, *names: str) -> None:
        self.names: tuple[str, ...] | None = names

    def find(self, file: AccountConfig) -> SelectedStreams:
        if self.names is None:
            raise SourceError("cannot connect to NATS")
        return SelectedStreams([name for name in self.names if file.selects(name)])


def written(tmp_path: Path, source: dict[str, Any], **sections: Any) -> Path:
    path = tmp_path / "account.yaml"
    path.write_text(yaml.safe_dump(given(source, **sections)))
    return path


def test_captures_come_with_streams_and_a_running_one_stays_until_it_ends_or_is_not_selected(tmp_path: Path) -> None:
    server, path = Server("A", "B"), written(tmp_path, {"streams": ["*"]})
    files = CaptureFiles([path], find=server.find)
    running = files.select().configs
    assert [capture.name for capture in running] == ["account.A", "account.B"]
    assert not files.single
    assert files.of_many
    server.names = ("C",)
    found = files.select(running)
    assert [capture.stream for capture in found.configs] == ["A", "B", "C"], "a capture tells by itself that it ends"
    ended = [capture for capture in found.configs if capture.stream != "A"]
    assert [capture.stream for capture in files.select(ended).configs] == ["B", "C"]
    server.names = None
    with pytest.raises(SourceError, match=r"^cannot connect to NATS$"):
        files.select(ended)
    server.names = ("A", "B", "C")
    written(tmp_path, {"streams": ["*", "!B"]})
    assert [capture.stream for capture in files.select(ended).configs] == ["B", "C", "A"], "as it was read"
    assert [capture.stream for capture in files.again().select(ended).configs] == ["C", "A"]
    written(tmp_path, {"streams": ["*"]}, key=5)
    with pytest.raises(ConfigError, match=r"^key: expected text, got 5"):
        files.again()


def test_a_running_capture_whose_settings_become_wrong_is_refused_and_a_new_one_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, {"streams": ["*"]}, store={"url": "/archive/{stream}"})
    files = CaptureFiles([path], find=Server("A", "odd name").find)
    running = files.select()
    assert [capture.stream for capture in running.configs] == ["A"]
    assert [capture.stream for capture in running.problems] == ["odd name"]
    with pytest.raises(ConfigError, match=f"^{path}: stream odd name: "):
        files.select([*running.problems])


def test_streams_beyond_those_allowed_and_those_of_another_file_are_left_out_and_named(tmp_path: Path) -> None:
    server, path = Server("A", "B", "C"), written(tmp_path, {"streams": ["*"], "max_streams": 2})
    found = CaptureFiles([path], find=server.find).select()
    assert [capture.stream for capture in found.configs] == ["A", "B"]
    (problem,) = found.problems.values()
    assert problem == (f"{path}: source.max_streams: 3 streams match, and 2 are captured; left out: C",)
    own = tmp_path / "own.yaml"
    own.write_text(yaml.safe_dump(given({"stream": "A"})))
    path = written(tmp_path, {"streams": ["*"]})
    found = CaptureFiles([own, path], find=Server("A", "B").find).select()
    assert [capture.name for capture in found.configs] == ["own", "account.B"]
    (problem,) = found.problems.values()
    work = "already captures stream A with consumer archive into this archive"
    assert problem == (f'{path}: stream A: {own} {work}; leave it out with "!A"',)
