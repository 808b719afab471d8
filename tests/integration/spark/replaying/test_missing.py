"""A stream that its server has rewound gets back what it lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nats.js.api import RetentionPolicy, StreamConfig

from jetcapture_py.verify.proof import verify
from spark_jobs.replay import main
from tests.support.nats_server import NatsServer
from tests.support.replays import Kept
from tests.support.rewinds import Setting, orders, rewound
from tests.support.running import STREAM, Message, connection

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("spark")]

Start = Callable[..., NatsServer]
Said = pytest.CaptureFixture[str]


@pytest.fixture
def setting(nats_server: Start, tmp_path: Path) -> Setting:
    return Setting(nats_server(), tmp_path)


def give_back(setting: Setting, *options: str) -> int:
    return main(["--config", str(setting.path), "--missing", *options])


def lose(setting: Setting, kept: int, last: int) -> None:
    """Publish and capture messages up to `last`, of which the server keeps only the first ones."""
    setting.publish(*orders(1, kept))
    setting.capture()
    with rewound(setting.server):
        setting.publish(*orders(kept + 1, last))
        setting.capture()


async def change(setting: Setting, method: str, *arguments: Any, **more: Any) -> None:
    """Call a method of JetStream."""
    async with connection(setting.server.url) as client:
        await getattr(client.jetstream(), method)(*arguments, **more)


def content(message: Kept) -> tuple[str, bytes, str | None]:
    return message.subject, message.payload, message.header("Index")


def published(messages: list[Message]) -> list[tuple[str, bytes, str | None]]:
    return [(subject, payload, dict(headers or ()).get("Index")) for subject, payload, headers in messages]


def test_a_rewound_stream_gets_back_what_it_lost_with_its_sequences(setting: Setting, capsys: Said) -> None:
    lose(setting, 100, 180)
    asyncio.run(change(setting, "purge_stream", STREAM, seq=20))  # what is removed on purpose stays away
    assert setting.last == 100
    capsys.readouterr()
    assert give_back(setting, "--dry-run") == 0
    assert capsys.readouterr().out == ("stream ORDERS ends at 100 and has lost 80 messages with sequences 101 to 180\n")
    assert give_back(setting, "--dry-run", "--from-seq", "141") == 0
    assert capsys.readouterr().out == ("stream ORDERS ends at 100 and has lost 40 messages with sequences 141 to 180\n")
    assert setting.last == 100
    assert give_back(setting, "--to-seq", "140") == 0  # as a run that was interrupted
    assert setting.last == 140
    assert give_back(setting) == 0
    assert capsys.readouterr().out.endswith("they have the sequences that they had, and new timestamps\n")
    messages = setting.stored()
    assert [content(message) for message in messages] == published(orders(20, 180))
    assert [message.header("Jetcapture-Sequence") for message in messages[81:]] == [*map(str, range(101, 181))]
    setting.capture()
    report = asyncio.run(verify(setting.config, content=True))
    assert (report.missing, report.complete, report.exit_code()) == (0, True, 0)
    assert give_back(setting) == 0
    assert capsys.readouterr().out == "stream ORDERS has lost no archived messages, or has them back\n"
    assert setting.last == 180


@pytest.mark.exhaustive
def test_what_new_messages_have_overtaken_comes_back_after_them(setting: Setting, capsys: Said) -> None:
    setting.publish(*orders(1, 60))
    setting.capture()
    with rewound(setting.server):
        setting.publish(*orders(61, 120))
        setting.capture()
        setting.delete(5, 70, 71)
    setting.publish(*orders(61, 90, "new"))
    setting.delete(6)
    assert give_back(setting) == 0
    assert "ends at 90 and has lost 60 messages with sequences 61 to 120\n" in (said := capsys.readouterr().out)
    assert "they have new sequences, after 90" in said
    setting.capture()
    assert setting.last == 150
    expected = published(orders(61, 90, "new") + orders(61, 120))
    assert [content(message) for message in setting.stored()[-90:]] == expected
    assert give_back(setting) == 0
    assert "has lost no archived messages" in capsys.readouterr().out


def test_streams_that_cannot_be_given_anything_back_are_one_line_each(
    setting: Setting, nats_server: Start, capsys: Said
) -> None:
    setting.publish(*orders(1, 20))
    setting.capture()
    for text, kind in (
        ("the archive has no message of the stream ORDERS that was created", StreamConfig()),
        ("has retention workqueue", StreamConfig(retention=RetentionPolicy.WORK_QUEUE)),
    ):
        asyncio.run(change(setting, "delete_stream", STREAM))
        asyncio.run(change(setting, "add_stream", kind, name=STREAM, subjects=["orders.>"]))
        assert give_back(setting) == 1
        error = capsys.readouterr().err
        assert text in error
        assert error.count("\n") == 1
    assert give_back(setting, "--servers", nats_server().url) == 1
    assert "stream ORDERS does not exist: jetcapture restore creates it" in capsys.readouterr().err


def test_a_lost_rollup_removes_no_messages(setting: Setting, capsys: Said) -> None:
    setting.publish(*orders(1, 10))
    asyncio.run(change(setting, "update_stream", name=STREAM, subjects=["orders.>"], allow_rollup_hdrs=True))
    setting.capture()
    with rewound(setting.server):
        setting.publish(*orders(11, 15), ("orders.a", b"sum", [("Nats-Rollup", "all")]))
        setting.capture()
    setting.publish(*orders(11, 13, "new"))
    before = setting.stored()
    assert give_back(setting, "--keep-header", "Nats-Rollup") == 1
    assert "has lost rollups and has taken new messages since it lost 1 message" in capsys.readouterr().err
    assert setting.stored() == before
    assert give_back(setting) == 0
    *others, rollup = setting.stored()
    assert others == before
    assert (rollup.payload, rollup.header("Nats-Rollup")) == (b"sum", None)
