"""Problems and warnings of a capture for people on call: one sentence each, and the remedy.

To add one, yield it in `notices`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from jetcapture_py.config.block import MANY_KEYS
from jetcapture_py.jetstream.connection import is_refusal
from jetcapture_py.jetstream.consumer import WRONG_CLOCK
from jetcapture_py.monitoring.health import Health
from jetcapture_py.monitoring.history import EVERY
from jetcapture_py.pages.words import age, duration
from jetcapture_py.text import plural, sentence, without_credentials

if TYPE_CHECKING:
    from jetcapture_py.capture.pipeline import Capture
    from jetcapture_py.monitoring.history import History

LASTING = 60.0
"""Seconds at a limit before it is worth a warning."""
_MANY_SEALS, _NEARLY_ALL = 20, 0.9

Level = Literal["failing", "warning", "note"]
LEVELS: Sequence[Level] = ("failing", "warning", "note")
"""The worst first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A problem or a remark."""

    level: Level
    """Failing: the capture is not ready."""
    text: str
    """The problem."""
    action: str
    """The remedy."""
    check: str = ""
    """The failing check."""
    since: datetime | None = None
    """When it began to fail, unless that is expected."""


def notices(capture: Capture, history: History, health: Health) -> Iterator[Notice]:
    """Yield all notices of a capture."""
    yield from _failures(capture, history, health)
    if capture.opened and not capture.draining and capture.ended is None:
        yield from _warnings(capture, history)
    yield from _notes(capture)


def _failures(capture: Capture, history: History, health: Health) -> Iterator[Notice]:
    actions = _actions(capture)
    for check, text in health.trouble.items():
        expected = check in health.expected
        yield Notice(
            level="note" if expected else "failing",
            check=check,
            text=sentence(text),
            action=_expected(capture) if expected else actions.get(check, ""),
            since=None if expected else history.failing_since(check),
        )


def _expected(capture: Capture) -> str:
    if capture.ended is not None:
        return "Everything received is stored and acknowledged."
    if not capture.opened:
        return "Connecting, looking up the consumer and checking that the store accepts objects; then pulling starts."
    return f"Storing and acknowledging everything held, for at most {duration(capture.config.drain_timeout)}."


def _actions(capture: Capture) -> dict[str, str]:
    source = capture.config.source
    servers = without_credentials(", ".join(capture.config.nats.servers))
    url = without_credentials(capture.config.store.url)
    remedy = f"Free space on the disk of {url}, or enlarge it."
    if not capture.archiver.uploads.storing.full:
        remedy = f"Check that {url} exists, accepts writes and can be reached."
    connect = f"It reconnects by itself, and nothing is lost. Check that {servers} can be reached."
    if is_refusal(capture.source.link.problem):
        connect = (
            "The server refuses the login. Nothing is lost: correct the user's password, credentials or permission to "
            "connect. Files are read again at each attempt; after another change of the configuration, restart."
        )
    return {
        "running": "Messages that were not stored are redelivered. Fix the cause, then send SIGHUP to restart it.",
        "connected": connect,
        "consuming": "It keeps trying, and nothing is lost. Check the stream's leader and the consumer: "
        f"nats consumer info {source.stream} {source.consumer}.",
        "decoding": "Nothing is stored until it returns. If it does not, only a restart helps; the messages are then "
        "delivered again.",
        "storing": f"Messages are held and the store is retried; nothing is lost while the stream keeps them. {remedy}",
    }


def _warning(text: str, action: str) -> Notice:
    return Notice(level="warning", text=text, action=action)


def _note(text: str, action: str) -> Notice:
    return Notice(level="note", text=text, action=action)


def _warnings(capture: Capture, history: History) -> Iterator[Notice]:
    source, consumer = capture.config.source, capture.source.state
    if consumer.paused:
        resume = f"nats consumer resume {source.stream} {source.consumer}"
        yield _warning("The consumer is paused, so nothing is delivered.", f"Resume it: {resume}.")
    if consumer.config.get("max_deliver", -1) > 0:
        tries = plural(consumer.config["max_deliver"], "delivery", "deliveries")
        text = f"The consumer gives up on a message after {tries}, so the archive may miss messages, and there is no "
        yield _warning(f"{text}watermark.", "Set the consumer's max_deliver to -1.")
    if abs(consumer.ahead) >= WRONG_CLOCK:
        text = f"This machine's clock is {age(abs(consumer.ahead))} {'ahead of' if consumer.ahead > 0 else 'behind'} "
        harm = "Ages are wrong, and object storage may refuse requests. Synchronize both clocks with NTP."
        yield _warning(f"{text}the NATS server's.", harm)
    if losses := capture.marks.stream.losses.total():
        text = f"The stream lost messages or was created again, {plural(losses, 'time')} since the process started."
        yield _warning(text, "What is archived stays. jetcapture verify names what the server has lost.")
    if capture.source.connected:
        yield from _behind(capture, history)
    if history.lasting(lambda sample: sample.unacked >= consumer.max_ack_pending, LASTING):
        text = f"{consumer.max_ack_pending:,} messages, as many as max_ack_pending allows, are not stored yet."
        yield _warning(f"Delivery waits: {text}", "Raise source.max_ack_pending, or shorten block.max_age.")
    limit = max(capture.ledger.memory.part, capture.ledger.memory.limit - capture.ledger.elsewhere)
    if history.lasting(lambda sample: sample.memory >= 0.95 * limit, LASTING):
        text = "limits.memory is used up, so pulling waits until objects are stored."
        yield _warning(text, "Raise limits.memory or store.concurrency, or add replicas.")
    if capture.stats.quarantine.messages and (recent := sum(sample.quarantined for sample in history.samples)):
        text = f"{plural(recent, 'message')} went to the quarantine in the last quarter of an hour."
        fix = "Nothing is lost. If the configuration is wrong, correct it and run jetcapture quarantine redecode; "
        yield _warning(text, f"{fix}otherwise fix the producer. The reasons are below.")
    if (rescued := capture.stats.rescued).messages:
        text = f"{plural(rescued.messages, 'row')} had values that do not fit their columns, such as {rescued.example}."
        yield _note(text, "Nothing is lost: they are in _nats_rescued. Declare decode.columns, or fix the producer.")


def _behind(capture: Capture, history: History) -> Iterator[Notice]:
    """Yield the backlog if it is more than blocks explain, and the time to catch up."""
    consumer, max_age = capture.source.state, capture.config.block.max_age
    lag = capture.marks.observer.lag(consumer).total_seconds()
    if lag <= capture.config.block.late_after:
        return
    behind = f"The oldest message that is not stored is {age(lag)} old; blocks are stored after {age(max_age)}."
    minute = list(history.samples)[-int(LASTING / EVERY) - 1 :]
    fewer = minute[0].pending - consumer.pending if len(minute) > 1 else 0
    if consumer.pending and fewer > 0:
        left = consumer.pending * (minute[-1].time - minute[0].time) / fewer
        messages = plural(consumer.pending, "message")
        yield _note(f"Catching up: {messages} to be delivered, about {age(left)} at the current rate.", behind)
    elif consumer.pending:
        waiting = plural(consumer.pending, "message waits", "messages wait")
        raised = "raise source.max_ack_pending if that limit is reached"
        yield _warning(behind, f"{waiting} to be delivered: add replicas, or {raised}.")
    else:
        held = "Every message is delivered, so it is waiting for the store or held by another replica; check the "
        yield _warning(behind, f"{held}status pages of all replicas.")


def _notes(capture: Capture) -> Iterator[Notice]:
    sealed_by = capture.archiver.sealed_by
    seals = sealed_by.total()
    if seals >= _MANY_SEALS and sealed_by["pressure"] > _NEARLY_ALL * seals:
        text = "Limits seal nearly all blocks before they are full or old, so objects are small."
        yield _note(text, "Raise source.max_ack_pending or limits, or let jetcapture maintain merge the objects.")
    if not capture.config.block.bundles and capture.archiver.blocks.open > MANY_KEYS:
        text = f"{capture.archiver.blocks.open:,} blocks are open, and each becomes an object."
        yield _note(text, "Set block.bundles, or use a coarser key.")
    if failures := capture.announcer.failures.total():
        text = f"{plural(failures, 'stored object was', 'stored objects were')} not announced."
        yield _note(text, "The event on_stored.failed says why. The objects are in the archive.")
    for warning in capture.config.warnings():
        yield _note(f"{warning}.", "")
