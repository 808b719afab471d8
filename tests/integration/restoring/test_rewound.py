"""A stream that its server has rewound comes back whole from its archive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jetcapture_py.archive import layout
from jetcapture_py.config.units import format_time
from jetcapture_py.verify.proof import verify
from tests.support.nats_server import NatsServer
from tests.support.replays import ask
from tests.support.restores import main
from tests.support.rewinds import Setting, orders, rewound
from tests.support.running import CONSUMER, STREAM, rows

Start = Callable[..., NatsServer]


@pytest.fixture
def setting(nats_server: Start, tmp_path: Path) -> Setting:
    return Setting(nats_server(), tmp_path)


def answers(setting: Setting, stream: str, last: int) -> list[dict[str, Any]]:
    return [ask(setting.server.url, f"STREAM.MSG.GET.{stream}", {"seq": seq})["message"] for seq in range(1, last + 1)]


def test_a_rewound_stream_is_restored_whole_and_the_proof_says_so(setting: Setting) -> None:
    setting.publish(*orders(1, 60))
    setting.capture()
    with rewound(setting.server):
        setting.publish(*orders(61, 120))
        setting.capture()
        before = answers(setting, STREAM, 120)
    assert setting.last == 60
    assert asyncio.run(verify(setting.config, content=True)).exit_code() == 1
    ask(setting.server.url, f"STREAM.DELETE.{STREAM}")
    assert main([str(setting.path), "--consumer", f"{CONSUMER}=120"]) == 0
    assert answers(setting, STREAM, 120) == before
    setting.publish(*orders(121, 125))
    setting.capture()
    report = asyncio.run(verify(setting.config, content=True))
    assert (report.complete, report.stored, report.missing, report.exit_code()) == (True, 125, 0, 0)


def test_a_stream_with_new_messages_after_a_rewind_is_restored_as_it_was_before(
    setting: Setting, capsys: pytest.CaptureFixture[str]
) -> None:
    setting.publish(*orders(1, 60))
    setting.capture()
    with rewound(setting.server):
        setting.publish(*orders(61, 120))
        setting.capture()
        before = answers(setting, STREAM, 120)
    setting.publish(*orders(61, 90, "new"))
    setting.capture()
    arguments = [str(setting.path), "--as", "BEFORE", "--subject-prefix", "before"]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert "sequence 61 has two messages: either the server rewound the stream" in error
    every = rows(setting.root) + rows(setting.root, quarantine=True)
    last = max(row[layout.TIMESTAMP] for row in every if row[layout.SEQ] == 120)
    assert main([*arguments, "--to-time", f"{format_time(last)[:-1]}999Z"]) == 0
    found = answers(setting, "BEFORE", 120)
    assert found == [{**message, "subject": f"before.{message['subject']}"} for message in before]
    assert ask(setting.server.url, "STREAM.INFO.BEFORE")["state"]["last_seq"] == 120
