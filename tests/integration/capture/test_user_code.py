"""Decoders and key functions of the user's own that misbehave, in a real capture: each message fails alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from jetcapture_py.archive import layout
from tests.support.misbehaving import ANSWERS, FAILURES, GOOD, KEYS, RAISES, Misbehaving, misbehaving_key
from tests.support.nats_server import NatsServer
from tests.support.running import Command, capture_all, config, consumer, publish, rows, settings


def assert_reasons(quarantine: list[dict[str, Any]], stages: set[str]) -> None:
    for row in quarantine:
        what = row[layout.PAYLOAD], row["stage"], row["error"]
        assert row["error"], what
        assert row["error"].isprintable(), what
        assert len(row["error"]) <= 300, what
        assert row["stage"] in stages, what


@pytest.mark.parametrize("batch", [1, 5, 5000])
async def test_whatever_a_decoder_does_only_the_messages_for_which_it_does_it_are_quarantined(
    server: NatsServer, archive: Path, batch: int
) -> None:
    faults = [name.encode() for name in (*RAISES, *ANSWERS, *FAILURES)]
    payloads = [*faults, *(GOOD + b"%d" % number for number in range(len(faults)))]
    random.Random(batch).shuffle(payloads)
    await publish(server.url, [("orders.eu", payload, None) for payload in payloads])
    await capture_all(config(server.url, archive, source={"batch": batch}), decoder=Misbehaving())
    good = rows(archive)
    assert [row[layout.PAYLOAD] for row in good] == [payload for payload in payloads if payload.startswith(GOOD)]
    assert [row["size"] for row in good] == [len(row[layout.PAYLOAD]) for row in good]
    bad = rows(archive, quarantine=True)
    assert [row[layout.PAYLOAD] for row in bad] == [payload for payload in payloads if payload in faults]
    assert_reasons(bad, {"decode", "s" * 39 + "…", "\ufffd"})
    state = await consumer(server.url)
    assert (state.num_ack_pending, state.num_pending) == (0, 0)


@pytest.mark.parametrize("batch", [1, 5, 5000])
async def test_whatever_a_key_function_does_only_the_messages_for_which_it_does_it_are_quarantined(
    server: NatsServer, archive: Path, batch: int
) -> None:
    subjects = [f"orders.{name.replace(' ', '_')}" for name in KEYS] + ["orders.eu"] * len(KEYS)
    random.Random(batch).shuffle(subjects)
    await publish(server.url, [(subject, b"%d" % number, None) for number, subject in enumerate(subjects)])
    await capture_all(config(server.url, archive, source={"batch": batch}), key=misbehaving_key)
    good, bad = rows(archive), rows(archive, quarantine=True)
    assert [row[layout.SUBJECT] for row in good] == ["orders.eu"] * len(KEYS)
    assert {row["key"] for row in good} == {"k"}
    assert [row[layout.SUBJECT] for row in bad] == [subject for subject in subjects if subject != "orders.eu"]
    assert_reasons(bad, {"key"})


def test_code_that_exits_when_it_is_loaded_is_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "own_code.py").write_text("import sys; sys.exit(0)")
    configuration = settings("nats://127.0.0.1:1", tmp_path / "archive", key="own_code:key")
    with Command(tmp_path, configuration, environment={"PYTHONPATH": str(tmp_path)}) as command:
        assert command.start().wait() == 2
    (line,) = command.log.splitlines()
    assert line.startswith("jetcapture: key: ")
    assert "own_code" in line
    assert "SystemExit: 0" in line
