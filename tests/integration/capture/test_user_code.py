"""Decoders and key functions of the user's own that misbehave, in a real capture: each message fails alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jetcapture_py.archive import layout
from tests.support.misbehaving import ANSWERS, FAILURES, GOOD, KEYS, RAISES, Misbehaving, misbehaving_key
from tests.support.nats_server import NatsServer
from tests.support.running import Command, capture_all, config, consumer, publish, rows, settings

Start = Callable[..., NatsServer]


def assert_reasons(quarantine: list[dict[str, Any]], stages: set[str]) -> None:
    for row in quarantine:
        what = row[layout.PAYLOAD], row["stage"], row["error"]
        assert row["error"], what
        assert row["error"].isprintable(), what
        assert len(row["error"]) <= 300, what
        assert row["stage"] in stages, what


@pytest.mark.parametrize("batch", [1, 5, 5000])
def test_whatever_a_decoder_does_only_the_messages_for_which_it_does_it_are_quarantined(
    nats_server: Start, tmp_path: Path, batch: int
) -> None:
    faults = [name.encode() for name in (*RAISES, *ANSWERS, *FAILURES)]
    payloads = [*faults, *(GOOD + b"%d" % number for number in range(len(faults)))]
    random.Random(batch).shuffle(payloads)
    server = nats_server()
    asyncio.run(publish(server.url, [("orders.eu", payload, None) for payload in payloads]))
    asyncio.run(capture_all(config(server.url, tmp_path / "archive", source={"batch": batch}), decoder=Misbehaving()))
    good = rows(tmp_path / "archive")
    assert [row[layout.PAYLOAD] for row in good] == [payload for payload in payloads if payload.startswith(GOOD)]
    assert [row["size"] for row in good] == [len(row[layout.PAYLOAD]) for row in good]
    bad = rows(tmp_path / "archive", quarantine=True)
    assert [row[layout.PAYLOAD] for row in bad] == [payload for payload in payloads if payload in faults]
    assert_reasons(bad, {"decode", "s" * 39 + "…", "\ufffd"})
    state = asyncio.run(consumer(server.url))
    assert (state.num_ack_pending, state.num_pending) == (0, 0)


@pytest.mark.parametrize("batch", [1, 5, 5000])
def test_whatever_a_key_function_does_only_the_messages_for_which_it_does_it_are_quarantined(
    nats_server: Start, tmp_path: Path, batch: int
) -> None:
    subjects = [f"orders.{name.replace(' ', '_')}" for name in KEYS] + ["orders.eu"] * len(KEYS)
    random.Random(batch).shuffle(subjects)
    server = nats_server()
    asyncio.run(publish(server.url, [(subject, b"%d" % number, None) for number, subject in enumerate(subjects)]))
    asyncio.run(capture_all(config(server.url, tmp_path / "archive", source={"batch": batch}), key=misbehaving_key))
    good, bad = rows(tmp_path / "archive"), rows(tmp_path / "archive", quarantine=True)
    assert [row[layout.SUBJECT] for row in good] == ["orders.eu"] * len(KEYS)
    assert {row["key"] for row in good} == {"k"}
    assert [row[layout.SUBJECT] for row in bad] == [subject for subject in subjects if subject != "orders.eu"]
    assert_reasons(bad, {"key"})


USER_MODULE = """
import sys
import pyarrow as pa
from jetcapture_py import layout
from jetcapture_py.transform.batch import Decoded

class Decoder:
    def decode(self, batch):
        if b"exit" in batch.column(layout.PAYLOAD).to_pylist():
            sys.exit(5)
        return Decoded(fields=pa.RecordBatch.from_arrays([], names=[]))

def key(batch, fields):
    if b"exit for its key" in batch.column(layout.PAYLOAD).to_pylist():
        sys.exit("no key")
    return batch.column(layout.SUBJECT)
"""


def test_the_command_survives_code_that_calls_exit_and_logs_why_the_messages_are_in_quarantine(
    nats_server: Start, tmp_path: Path
) -> None:
    (tmp_path / "own_code.py").write_text(USER_MODULE)
    server = nats_server()
    payloads = [b"a", b"exit", b"b", b"exit for its key", b"c"]
    asyncio.run(publish(server.url, [("orders.eu", payload, None) for payload in payloads]))
    configuration = settings(
        server.url, tmp_path / "archive", decode={"format": "own_code:Decoder"}, key="own_code:key"
    )
    with Command(tmp_path, configuration, environment={"PYTHONPATH": str(tmp_path)}) as command:
        assert command.start("--until-caught-up").wait() == 0
    assert [row[layout.PAYLOAD] for row in rows(tmp_path / "archive")] == [b"a", b"b", b"c"]
    bad = rows(tmp_path / "archive", quarantine=True)
    assert [(row[layout.PAYLOAD], row["stage"], row["error"]) for row in bad] == [
        (b"exit", "decode", "SystemExit: 5"),
        (b"exit for its key", "key", "SystemExit: no key"),
    ]
    assert [entry["first_error"] for entry in command.events("messages.quarantined")] == ["SystemExit: 5"]


STORE_MODULE = """
import pathlib, time

class Store:
    def __init__(self, url, options):
        self.root = pathlib.Path(url.removeprefix("own://"))

    def put(self, name, data):
        target = self.root / name.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data.to_pybytes())
        return str(target)

    def probe(self):
        pass

    def read_note(self, path):
        READ

    def list_notes(self, directory):
        return []

    def change_note(self, path, change):
        change(self.read_note(path))
        time.sleep(3600)
"""


@pytest.mark.parametrize(
    ("read", "error"),
    [
        pytest.param("raise KeyError('NoSuchKey')", "KeyError", marks=pytest.mark.exhaustive),
        pytest.param("raise SystemExit(3)", "SystemExit", marks=pytest.mark.exhaustive),
        ("return None", "the store did not answer in time"),  # it hangs in `change_note`
    ],
)
def test_a_store_whose_watermark_cannot_be_written_for_any_reason_goes_on_storing(
    nats_server: Start, tmp_path: Path, read: str, error: str
) -> None:
    (tmp_path / "own_code.py").write_text(STORE_MODULE.replace("READ", read))
    server = nats_server()
    asyncio.run(publish(server.url, [("orders.eu", b"a", None), ("orders.eu", b"b", None)]))
    configuration = settings(server.url, tmp_path / "archive", drain_timeout="15s")
    configuration["store"] = {"type": "own_code:Store", "url": f"own://{tmp_path / 'archive'}"}
    with Command(tmp_path, configuration, environment={"PYTHONPATH": str(tmp_path)}) as command:
        assert command.start("--until-caught-up").wait() == 0, command.log
    assert [row[layout.PAYLOAD] for row in rows(tmp_path / "archive")] == [b"a", b"b"]
    failed = next(iter(command.events("watermark.failed")))
    assert error in failed["error"]


@pytest.mark.parametrize(
    ("code", "setting"),
    [
        ("import sys; sys.exit(0)", {"key": "own_code:key"}),
        (
            "class Decoder:\n    def __init__(self):\n        raise KeyError(0)",
            {"decode": {"format": "own_code:Decoder"}},
        ),
    ],
)
def test_code_that_cannot_be_loaded_is_a_wrong_setting_also_when_it_calls_exit(
    tmp_path: Path, code: str, setting: dict[str, Any]
) -> None:
    (tmp_path / "own_code.py").write_text(code)
    configuration = settings("nats://127.0.0.1:1", tmp_path / "archive", **setting)
    with Command(tmp_path, configuration, environment={"PYTHONPATH": str(tmp_path)}) as command:
        assert command.start().wait() == 2
    (line,) = command.log.splitlines()
    assert line.startswith(("jetcapture: decode: ", "jetcapture: key: "))
    assert "own_code" in line
    assert "SystemExit: 0" in line or "KeyError: 0" in line
