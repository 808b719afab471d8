"""What stands in a subject, header, field or key leads nowhere: not on disk, not in a log, a terminal or a page."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as pads
import pytest
import yaml

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.config import model
from jetcapture_py.config.model import parse
from jetcapture_py.errors import ConfigError
from spark_jobs.query import table
from tests.support.nats_server import NatsServer
from tests.support.running import (
    STREAM,
    Command,
    capture_all,
    config,
    connection,
    objects,
    publish,
    running,
    serve,
    settings,
)

NASTY = (
    *("..", ".", "../..", "../../etc/passwd", "/etc/passwd", "a/b", "a\\..\\b", "//", "\0", "a\0b", "a\nb"),
    *("a\r\nINFO capture.stopped", '"}\n{"level": "error", "event": "forged"', "\x1b[2J\x1b[31mred", "\x9b31m\x85\x7f"),
    *("\u2028\u2029\u202egnp.exe", "%2e%2e%2f", "%00", "%", "__HIVE_DEFAULT_PARTITION__"),
    *("%5F_HIVE_DEFAULT_PARTITION__", "_quarantine", "_watermark", "_streams", ".hidden", ".x.tmp", "~root", "-rf"),
    *("key=x", "date=2026-01-01", "*?[a-z]{b}", "'; DROP TABLE archive; --", '"quoted" `ticked`'),
    *("<script>alert(1)</script>", "${HOME} $(touch pwned) `touch pwned`", "{subject} {{7*7}}", "os:system"),
    *("!!python/name:os.system", "&a *a", "=1+1", "007", "null", "größe.日本", "\U0001f600", "x" * 240, " "),
    " lead and trail ",
)
TOO_LONG = ("x" * 241, "/" * 100, "\U0001f600" * 80, "../" * 5000)


def document(name: str) -> dict[str, Any]:
    """A message whose field `region` is the name, and that has a field of that name."""
    return {"region": name, f"f {name}"[:300]: name, name[:300]: {name[:300]: 1}}


def messages() -> Iterator[tuple[bytes, bytes, bytes]]:
    """Subject, header block and payload of every message."""
    for name in (*NASTY, *TOO_LONG):
        words = name.encode().translate(bytes(range(256)), b" \t\r\n\0")
        token = b".".join(part for part in words[:400].split(b".") if part) or b"none"
        header = name.encode().replace(b"\r", b"").replace(b"\n", b"")
        block = b"NATS/1.0\r\nX-Tenant:%b\r\n%b: 1\r\n\r\n" % (header, header.replace(b":", b"") or b"H")
        yield b"orders." + token, block, json.dumps(document(name)).encode()


async def send(url: str) -> int:
    """Publish them over a bare socket, as a client that checks nothing would; how many the stream has taken."""
    await publish(url, [])
    frames = [b'CONNECT {"verbose":false,"pedantic":false,"headers":true}\r\n']
    for subject, block, payload in messages():
        head = b"HPUB %b %d %d\r\n" % (subject, len(block), len(block) + len(payload))
        frames.append(head + block + payload + b"\r\n")
    host, port = url.removeprefix("nats://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"".join(frames) + b"PING\r\n")
        answer = b""
        while not answer.endswith(b"PONG\r\n"):
            answer += connection.recv(1 << 16)
    assert b"-ERR" not in answer
    return await publish(url, [])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer(tmp_path_factory.mktemp("nats")) as started:
        assert asyncio.run(send(started.url)) == len(NASTY) + len(TOO_LONG)
        yield started


def test_other_readers_find_the_same_keys(server: NatsServer, tmp_path: Path) -> None:
    root, decode = tmp_path / "archive", {"format": "json"}
    asyncio.run(capture_all(config(server.url, root, key="{region}", decode=decode, source={"consumer": "hive"})))
    columns = pa.schema([(name, pa.string()) for name in layout.PARTITIONS])
    partitions = pads.HivePartitioning(columns, segment_encoding="uri")
    paths = [str(root / name.path) for name in objects(root) if not name.quarantine]
    base = str(root / STREAM)
    read = pads.dataset(paths, partitioning=partitions, partition_base_dir=base, format="parquet")
    table = read.to_table(columns=["key", "region"])
    sent = [None if name == layout.DEFAULT_PARTITION else name for name in table.column("region").to_pylist()]
    assert table.column("key").to_pylist() == sent, "pyarrow takes the default partition's name for it even if escaped"
    assert len(set(sent)) == len(NASTY)


def raw_lines(log: bytes) -> list[str]:
    """The log's lines; nothing in them may move a cursor or end a line."""
    text = log.decode("utf-8")
    assert text.endswith("\n")
    lines = text.removesuffix("\n").split("\n")
    for line in lines:
        assert line.isprintable(), ascii(line)
    return lines


@pytest.mark.parametrize("form", ["json", "text"])
def test_no_name_writes_a_line_into_the_log(server: NatsServer, tmp_path: Path, form: str) -> None:
    found = settings(
        server.url,
        tmp_path / "archive",
        key="{region}",
        decode={"format": "json", "columns": {"region": "string"}},
        source={"consumer": f"log-{form}"},
        log={"format": form, "level": "debug"},
        store={"concurrency": 1},
        block={"max_bytes": "1"},  # an object for each message
    )
    with Command(tmp_path, found, f"log-{form}") as replica:
        assert replica.start("--until-caught-up").wait() == 0, replica.log
    lines = raw_lines((tmp_path / f"log-{form}.log").read_bytes())
    assert len(lines) < 200
    events = [json.loads(line)["event"] if form == "json" else line.split(" ")[2] for line in lines]
    assert set(events) <= {"capture.started", "messages.quarantined", "blocks.stored", "capture.stopped"}
    assert events.count("capture.stopped") == 1


def test_names_on_disk_write_nothing_on_the_terminal(server: NatsServer, tmp_path: Path) -> None:
    archive, path = tmp_path / "archive", tmp_path / "capture.yaml"
    data = settings(server.url, archive, key="{region}", decode={"format": "json"}, source={"consumer": "shown"})
    asyncio.run(capture_all(parse(data)))
    path.write_text(yaml.safe_dump(data))
    stored = objects(archive)
    for name in ("\x1b[2J", "a\nb", "\u202e.parquet", "\x9b31m"):
        (archive / STREAM / name).write_text("foreign")
    (archive / stored[3].path).write_bytes(b"damaged")
    (archive / stored[4].path).unlink()
    for options in ((), ("--json",)):
        words = [sys.executable, "-m", "jetcapture_py", "verify", str(path), *options]
        done = subprocess.run(words, capture_output=True, timeout=300, check=False)
        assert (done.returncode, done.stderr) == (1, b"")
        lines = raw_lines(done.stdout)
        assert "u001b[2J" in "".join(lines)
        if options:
            (line,) = lines
            (foreign,) = (each for each in json.loads(line)["findings"] if each["kind"] == "foreign")
            assert "\x1b[2J" in "".join(entry["path"] for entry in foreign["paths"])


def test_no_name_is_markup_in_the_page_or_a_label_of_the_metrics(nats_server: Callable[..., NatsServer]) -> None:
    stream, consumer = "A\"'<b&", 'c"}1#<i&lt;'

    async def pages(url: str) -> list[str]:
        async with connection(url) as client:
            await client.jetstream().add_stream(name=stream, subjects=["a"])
        async with running(config(url, "memory://x", source={"stream": stream, "consumer": consumer})) as capture:
            with serve(capture, "127.0.0.1:0") as port:
                return [await asyncio.to_thread(fetch, f"http://127.0.0.1:{port}{path}") for path in ("/", "/metrics")]

    page, metrics = asyncio.run(pages(nats_server().url))
    assert not re.search("<b(?!ody>)|<i", page)
    assert "A&#34;&#39;&lt;b&amp; / c&#34;}1#&lt;i&amp;lt;" in page
    (line,) = (line for line in metrics.splitlines() if line.startswith("jetcapture_info{"))
    assert 'stream="A\\"\'<b&"' in line
    assert 'consumer="c\\"}1#<i&lt;"' in line


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def test_a_table_of_results_writes_no_line_and_moves_no_cursor() -> None:
    for name in NASTY:
        lines = list(table([name, "b"], [[name, None], ["x", name]]))
        assert len(lines) == 4
        assert all(line.isprintable() for line in lines)


RESERVED = ("_quarantine", "_watermark", "_streams", "_columns")


def test_a_stream_leads_nowhere_either() -> None:
    for name in (*NASTY, "a b", "a.b"):
        data = settings("nats://127.0.0.1:4222", "/data", source={"stream": name})
        if re.fullmatch(r"[^\s.*>/\\]+", name) and name.isprintable() and name not in RESERVED:
            parts = {"key": None, "bucket": 0, "first_seq": 1, "last_seq": 1, "rows": 1, "digest": "0" * 16}
            path = f"/data/{ObjectName(stream=parse(data).source.stream, **parts).path}"
            assert os.path.normpath(path) == path
        else:
            with pytest.raises(ConfigError, match=r"source\.stream"):
                parse(data)


# ------------------------------------------------------------------ a configuration


MINIMAL = "source: {stream: A, consumer: b}\nstore: {url: /data}\n"


@pytest.mark.parametrize("line", ["key: {}", "store: {{url: /x, options: {{a: {}}}}}", "{}: 1"])
def test_no_tag_makes_an_object(tmp_path: Path, line: str) -> None:
    mark = tmp_path / "mark"
    for value in (
        f"!!python/object/apply:os.mkdir [{mark}]",
        f"!<tag:yaml.org,2002:python/object/apply:os.mkdir> [{mark}]",
        "!!python/name:os.system",
        "!!binary aGk=",
        "!mine {a: 1}",
    ):
        text = line.format(value)
        with pytest.raises(ConfigError):
            model.loads(text if "store" in text else f"{MINIMAL}{text}\n", {})
    assert not mark.exists()


def test_names_given_twice_are_refused_at_every_level() -> None:
    for text in (
        "source: {stream: A, consumer: b}\nstore: {url: /data, options: {a: {b: 1, b: 2}}}\n",
        f'{MINIMAL}"key": a\nkey: b\n',
    ):
        with pytest.raises(ConfigError, match="set twice, on line"):
            model.loads(text, {})
    merge = "base: &base {stream: X}\nsource: {<<: *base, consumer: b}\nstore: {url: /data}\n"
    with pytest.raises(ConfigError, match="unknown setting"):
        model.loads(merge, {})
