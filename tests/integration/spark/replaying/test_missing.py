"""A stream that its server has rewound gets back what it lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, RetentionPolicy, StreamConfig

from jetcapture_py.archive import layout
from jetcapture_py.verify.proof import verify
from spark_jobs.replay import main
from tests.support.nats_server import NatsServer
from tests.support.replays import Kept
from tests.support.rewinds import Setting, orders, rewound
from tests.support.running import STREAM, Message, connection, rows

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("spark")]

Start = Callable[..., NatsServer]
Said = pytest.CaptureFixture[str]


@pytest.fixture
def setting(nats_server: Start, tmp_path: Path) -> Setting:
    return Setting(nats_server(), tmp_path)


def give_back(setting: Setting, *options: str) -> int:
    return main(["--config", str(setting.path), "--missing", *options])


def lose(setting: Setting, kept: int, last: int, **limits: Any) -> None:
    """Publish and capture messages up to `last`, of which the server keeps only the first ones."""
    setting.publish(*orders(1, kept))
    if limits:
        asyncio.run(_change(setting, **limits))
    setting.capture()
    with rewound(setting.server):
        setting.publish(*orders(kept + 1, last))
        setting.capture()


def content(message: Kept) -> tuple[str, bytes, str | None]:
    return message.subject, message.payload, message.header("Index")


def published(messages: list[Message]) -> list[tuple[str, bytes, str | None]]:
    return [
        (subject, payload, dict(headers).get("Index") if headers else None) for subject, payload, headers in messages
    ]


def test_a_rewound_stream_gets_back_what_it_lost_with_its_sequences(setting: Setting, capsys: Said) -> None:
    lose(setting, 100, 180)
    assert setting.last == 100
    capsys.readouterr()
    assert give_back(setting, "--dry-run") == 0
    assert capsys.readouterr().out == ("stream ORDERS ends at 100 and has lost 80 messages with sequences 101 to 180\n")
    assert setting.last == 100
    assert give_back(setting, "--to-seq", "140") == 0  # as a run that was interrupted
    assert setting.last == 140
    assert give_back(setting) == 0
    assert capsys.readouterr().out.endswith("they have the sequences that they had, and new timestamps\n")
    assert [content(message) for message in setting.stored()] == published(orders(1, 180))
    assert [message.header("Jetcapture-Sequence") for message in setting.stored()[100:]] == [
        str(seq) for seq in range(101, 181)
    ]
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
    kept = [each for each in rows(setting.root) + rows(setting.root, quarantine=True) if each[layout.SEQ] > 60]
    by_seq: dict[int, list[bytes]] = {}
    for each in sorted(kept, key=lambda row: row[layout.TIMESTAMP]):
        by_seq.setdefault(each[layout.SEQ], []).append(each[layout.PAYLOAD])
    expected = [payload for _, payload, _ in orders(61, 90, "new") + orders(61, 120)]
    assert [by_seq[seq][-1] for seq in range(61, 151)] == expected
    assert give_back(setting) == 0
    assert "has lost no archived messages" in capsys.readouterr().out


def test_messages_that_were_removed_on_purpose_stay_away(setting: Setting, capsys: Said) -> None:
    setting.publish(*orders(1, 50))
    setting.capture()
    setting.delete(3, 49, 50)
    asyncio.run(_purge(setting, 20))
    assert give_back(setting) == 0
    assert "has lost no archived messages" in capsys.readouterr().out
    assert setting.last == 50


async def _purge(setting: Setting, seq: int) -> None:
    async with connection(setting.server.url) as client:
        await client.jetstream().purge_stream(STREAM, seq=seq)


def test_streams_that_cannot_be_given_anything_back_are_one_line_each(
    setting: Setting, nats_server: Start, capsys: Said
) -> None:
    setting.publish(*orders(1, 20))
    setting.capture()
    refused = {
        "the archive has no message of the stream ORDERS that was created": StreamConfig(subjects=["orders.>"]),
        "has retention workqueue": StreamConfig(subjects=["orders.>"], retention=RetentionPolicy.WORK_QUEUE),
    }
    for text, kind in refused.items():
        asyncio.run(_create_again(setting, kind))
        assert give_back(setting) == 1
        error = capsys.readouterr().err
        assert text in error
        assert error.count("\n") == 1
    elsewhere = nats_server()
    assert give_back(setting, "--servers", elsewhere.url) == 1
    assert "stream ORDERS does not exist: jetcapture restore creates it" in capsys.readouterr().err


async def _create_again(setting: Setting, kind: StreamConfig) -> None:
    async with connection(setting.server.url) as client:
        await client.jetstream().delete_stream(STREAM)
        await client.jetstream().add_stream(kind, name=STREAM)


def test_older_messages_do_not_replace_newer_ones_of_their_subject(setting: Setting, capsys: Said) -> None:
    lose(setting, 10, 20)
    setting.publish(*orders(11, 13, "new"))
    asyncio.run(_change(setting, max_msgs_per_subject=50))
    assert give_back(setting) == 1
    assert "older ones would replace them" in capsys.readouterr().err
    assert setting.last == 13


def test_a_lost_rollup_removes_no_messages(setting: Setting, capsys: Said) -> None:
    setting.publish(*orders(1, 10))
    asyncio.run(_change(setting, allow_rollup_hdrs=True))
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


@pytest.mark.exhaustive
def test_what_new_messages_that_were_not_captured_have_overtaken_is_found_from_a_sequence(
    setting: Setting, capsys: Said
) -> None:
    lose(setting, 60, 120)
    setting.publish(*orders(61, 130, "new"))
    asyncio.run(_skip(setting, 121))  # as a server that leaves the consumer ahead
    setting.capture()
    assert give_back(setting) == 0
    assert "has lost no archived messages" in capsys.readouterr().out
    assert give_back(setting, "--from-seq", "50") == 0
    assert "ends at 130 and has lost 60 messages with sequences 61 to 120\n" in capsys.readouterr().out
    expected = published(orders(1, 60) + orders(61, 130, "new") + orders(61, 120))
    assert [content(message) for message in setting.stored()] == expected


@pytest.mark.exhaustive
def test_a_message_comes_back_although_one_with_its_sequence_came_back_shortly_before(setting: Setting) -> None:
    setting.publish(*orders(1, 10))
    setting.capture()
    with rewound(setting.server):
        setting.publish(*orders(11, 20))
        setting.delete(12)
        setting.capture()
    assert give_back(setting) == 0
    setting.capture()
    assert setting.last == 19
    with rewound(setting.server):
        setting.publish(*orders(20, 20, "later"))
        setting.capture()
    assert give_back(setting) == 0
    assert [content(message) for message in setting.stored()[19:]] == published(orders(20, 20, "later"))


async def _skip(setting: Setting, seq: int) -> None:
    async with connection(setting.server.url) as client:
        await client.jetstream().delete_consumer(STREAM, "archive")
        start = ConsumerConfig(
            durable_name="archive",
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=seq,
            ack_policy=AckPolicy.EXPLICIT,
        )
        await client.jetstream().add_consumer(STREAM, start)


async def _change(setting: Setting, **changes: Any) -> None:
    async with connection(setting.server.url) as client:
        await client.jetstream().update_stream(name=STREAM, subjects=["orders.>"], **changes)
