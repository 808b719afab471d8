"""What would feed itself, or is past the last sequence, is refused; streams with ordinary subjects are not."""

from __future__ import annotations

from typing import Any, cast

from jetcapture_py.config.model import NatsConfig
from jetcapture_py.jetstream.connection import Api
from jetcapture_py.jetstream.unreadable import LAST_SEQ, Notifier, notification_loop, unreadable

SERVERS = ("nats://127.0.0.1",)


def problem(*subjects: str, last: int = 0, **nats: Any) -> str | None:
    api = Api(cast("Any", None), NatsConfig(servers=SERVERS, **nats))
    return unreadable(api, {"config": {"name": "S", "subjects": subjects}, "state": {"last_seq": last}})


def test_a_stream_that_would_store_its_own_deliveries_is_refused() -> None:
    for subjects, settings, overlapped in (
        ([">"], {}, "_INBOX.*.>"),
        (["orders.>", "_INBOX.>"], {}, "_INBOX.*.>"),
        (["*.*.*"], {}, "_INBOX.*.>"),
        (["inbox.a.>"], {"inbox_prefix": "inbox.a"}, "inbox.a.*.>"),
        (["$JS.>"], {}, "$JS.ACK.>"),
        (["$JS.API.CONSUMER.MSG.NEXT.>"], {}, "$JS.API.>"),
        (["$JS.hub.API.>"], {"domain": "hub"}, "$JS.hub.API.>"),
        (["hub.>"], {"api_prefix": "hub.api"}, "hub.api.>"),
    ):
        assert problem(*subjects, **settings) == (
            f"stream S takes {subjects[-1]}, which overlaps {overlapped}, so it would store every delivery again, "
            "without end; give it other subjects"
        )


def test_other_subjects_are_not_refused_unless_the_server_delivers_nothing_more() -> None:
    harmless = [(), ("orders.>",), ("*.*",), ("$KV.x.>",), ("$O.x.C.>", "$O.x.M.>"), ("$SYS.>",)]
    harmless += [("_INBOX.*",), ("$JS.EVENT.ADVISORY.>",)]  # replies have two tokens after the prefix
    for subjects in harmless:
        assert problem(*subjects) is None
        assert problem(*subjects, last=LAST_SEQ - 1) is None
    assert "deliver nothing from sequence 4611686018427387904 on" in str(problem("orders.>", last=LAST_SEQ))


def notifier(stream: str, subject: str, *filters: str) -> Notifier:
    return Notifier(stream=stream, subject=subject, taken=(f"{stream}.>",), filters=filters)


def test_notifications_that_come_back_are_refused() -> None:
    for captures, sender in (
        ([notifier("a", "a.stored")], ""),
        ([notifier("a", "a.stored", "a.orders")], None),
        ([notifier("a", "b.x"), notifier("b", "a.x")], "b"),
        ([notifier("a", "b.x"), notifier("b", "a.x", "b.orders")], None),
        ([notifier("a", "b.x"), notifier("b", "c.x"), notifier("c", "a.x")], "c"),
        ([notifier("a", "b.x"), notifier("b", "c.x"), notifier("c", "b.x")], None),  # trouble of the two others
        ([notifier("a", "notes"), notifier("b", "notes")], None),
    ):
        text = notification_loop(captures[0], captures)
        assert (text is None) == (sender is None)
        assert not sender or f"notifications of stream {sender} " in str(text)
