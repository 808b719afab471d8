"""Refuse changes that a server cannot make in place, that would delete messages, or that it is too old for.

The server refuses most of these itself, but only when the change is requested. Rules are those of nats-server
2.10 to 2.15 (`configUpdateCheck` of its stream.go, `checkNewConsumerConfig` of its consumer.go). What deletes messages
of streams with retention interest or workqueue was also measured, on 2.10.26 and 2.15.1, alone and in a cluster.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from jetcapture_py.config.subjects import matches
from jetcapture_py.config.units import format_nanoseconds
from jetcapture_py.jetstream.admin import ConsumerState, filters_of
from jetcapture_py.jetstream.settings import Difference, normal
from jetcapture_py.text import escaped, plural

SINCE = {
    "allow_msg_ttl": (2, 11),
    "subject_delete_marker_ttl": (2, 11),
    "allow_msg_counter": (2, 12),
    "allow_atomic": (2, 12),
    "allow_msg_schedules": (2, 12),
    "persist_mode": (2, 12),
    "allow_batched": (2, 14),
    "pause_until": (2, 11),
}
"""Server version that introduced a setting; 2.10 supports those without an entry."""

_FIXED_STREAM = {
    "storage": "messages cannot be moved between file and memory",
    "allow_msg_counter": "it can only be set when a stream is created",
    "persist_mode": "it can only be set when a stream is created",
    "first_seq": "it can only be set when a stream is created",
}
_STAYS_ON = {
    "sealed": "a sealed stream cannot be unsealed",
    "deny_delete": "it cannot be turned off again",
    "deny_purge": "it cannot be turned off again",
    "allow_msg_ttl": "it cannot be turned off again",
    "allow_msg_schedules": "it cannot be turned off again",
}
_FIXED_CONSUMER = {
    "deliver_policy": "the start of a consumer cannot be changed",
    "opt_start_seq": "the start of a consumer cannot be changed",
    "opt_start_time": "the start of a consumer cannot be changed",
    "replay_policy": "it can only be set when a consumer is created",
    "ack_policy": "it can only be set when a consumer is created",
    "max_waiting": "it can only be set when a consumer is created",
    "mem_storage": "it can only be set when a consumer is created",
}
MAX_SUBJECTS = 3
"""Subjects that a refusal names."""

_DELETES = "the server would delete {}; to allow that, use `nats stream edit`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The connected server: its version, and whether it is part of a cluster."""

    version: str
    clustered: bool

    @property
    def number(self) -> tuple[int, ...]:
        """The version as numbers."""
        return tuple(int(part) for part in re.findall(r"\d+", self.version)[:2])

    def too_old_for(self, setting: str, value: Any) -> str | None:
        """Return why a setting cannot be set; None if this server supports it."""
        since = SINCE.get(setting)
        if since is None or self.number >= since or normal(setting, value) is None:
            return None
        return f"nats-server {self.version} does not support it; {'.'.join(map(str, since))} does"

    def without_cluster(self, setting: str, value: Any) -> str | None:
        """Return why there cannot be several replicas; None if there can."""
        if setting == "num_replicas" and not self.clustered and (value or 0) > 1:
            return "this server is not part of a cluster"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMessages:
    """A stream's stored messages.

    Attributes:
        messages: How many there are.
        size: Their size in bytes.
        oldest: Age of the oldest one.
        most_per_subject: How many the largest subject has.
        copied: Whether they come from other streams.
    """

    messages: int
    size: int
    oldest: timedelta
    most_per_subject: int
    copied: bool

    @classmethod
    def of(cls, answer: Mapping[str, Any], most_per_subject: int) -> StoredMessages:
        """Read the server's answer to STREAM.INFO."""
        state = answer["state"]
        now = datetime.fromisoformat(answer["ts"]) if "ts" in answer else None
        first = datetime.fromisoformat(state["first_ts"]) if state["messages"] else None
        age = now - first if now and first else timedelta()
        return cls(
            messages=state["messages"],
            size=state["bytes"],
            oldest=age,
            most_per_subject=most_per_subject,
            copied=bool(answer["config"].get("mirror") or answer["config"].get("sources")),
        )

    def deleted_by(self, change: Difference, settings: Mapping[str, Any]) -> str | None:
        """Return why a change would delete messages, None if it would not. `settings` include the change."""
        limit, what = change.wanted or 0, None
        old = settings.get("discard", "old") == "old"
        if not self.messages:
            return None
        if change.name == "retention" and change.wanted == "interest":
            what = "messages that no consumer still needs"
        elif change.name == "consumer_limits" and settings.get("retention") == "interest" and _sooner(change):
            what = (
                "consumers that are idle for longer, once it restarts, and with them the messages that only they need"
            )
        elif change.name == "allow_msg_ttl" and self.copied:
            what = "copied messages whose own TTL is over"
        elif change.name == "max_age" and limit and self.oldest > timedelta(microseconds=limit / 1000):
            what = "messages that are older"
        elif change.name == "max_msgs_per_subject" and 0 < limit < self.most_per_subject:
            what = "the oldest messages of some subjects"
        elif old and change.name in ("max_msgs", "discard") and (surplus := self._surplus(settings)):
            what = plural(surplus, "message", grouped=True)
        elif old and change.name in ("max_bytes", "discard") and 0 < settings.get("max_bytes", -1) < self.size:
            what = "its oldest messages"
        return None if what is None else _DELETES.format(what)

    def _surplus(self, settings: Mapping[str, Any]) -> int:
        most = settings.get("max_msgs", -1)
        return max(self.messages - most, 0) if most > 0 else 0


def stream_refusal(change: Difference, actual: Mapping[str, Any], server: Server) -> str | None:
    """Return why a stream's setting cannot be changed in place; None if it can."""
    name, new, old = change.name, change.wanted, change.actual
    if reason := server.too_old_for(name, new) or server.without_cluster(name, new):
        return reason
    if name in _FIXED_STREAM:
        return _FIXED_STREAM[name]
    if name in _STAYS_ON and old:
        return _STAYS_ON[name]
    if name == "retention" and "workqueue" in (new, old):
        return "a stream cannot be changed to or from a work queue"
    if name == "mirror" and normal(name, new) is not None:
        return "a mirror's origin can only be set when it is created"
    if name == "mirror" and server.number < (2, 12):
        return f"nats-server {server.version} cannot turn a mirror into an ordinary stream; 2.12 can"
    if name == "max_consumers" and server.number < (2, 12):
        return f"nats-server {server.version} cannot change it; 2.12 can"
    if name == "discard_new_per_subject" and new and actual.get("discard") != "new":
        return "it needs discard: new"
    window = actual.get("duplicate_window", 0)
    if name == "max_age" and new and new < window:
        return "it is shorter than duplicate_window; change that as well"
    return None


def _sooner(change: Difference) -> bool:
    """Whether a change of an `inactive_threshold` lets the server delete consumers sooner."""
    new, old = (
        value.get("inactive_threshold") if isinstance(value, Mapping) else value
        for value in (change.wanted, change.actual)
    )
    return bool(new) and (not old or new < old)


def consumer_refusal(change: Difference, actual: Mapping[str, Any], server: Server) -> str | None:
    """Return why a consumer's setting cannot be changed in place; None if it can."""
    if reason := server.too_old_for(change.name, change.wanted) or server.without_cluster(change.name, change.wanted):
        return reason
    if change.name == "ack_wait" and actual.get("backoff"):
        return "the consumer's backoff replaces it; set source.consumer_config.backoff"
    return _FIXED_CONSUMER.get(change.name)


@dataclass(slots=True)
class DeletedMessages:
    """Messages that the server would delete: their count, at most or exactly, and some of their subjects."""

    count: int = 0
    exact: bool = True
    subjects: list[str] = field(default_factory=list)

    def add(self, subject: str, count: int, *, exact: bool) -> None:
        """Add the messages of a subject."""
        self.count += count
        self.exact = self.exact and exact
        if len(self.subjects) <= MAX_SUBJECTS:
            self.subjects.append(subject)

    def __str__(self) -> str:
        names = ", ".join(map(escaped, self.subjects[:MAX_SUBJECTS]))
        more = ", …" if len(self.subjects) > MAX_SUBJECTS else ""
        return f"{'' if self.exact else 'up to '}{plural(self.count, 'message', grouped=True)} ({names}{more})"


class ConsumerChange:
    """What a stream with retention interest or workqueue deletes when one of its consumers is changed.

    With `interest` the server deletes what no consumer needs any more. A work queue deletes what is below the position
    of the consumer whose filters match it, even if that was never delivered. Feed every subject to `add`, then ask
    `refusal`.
    """

    def __init__(
        self, stream: Mapping[str, Any], settings: Mapping[str, Any], actual: ConsumerState, request: Mapping[str, Any]
    ) -> None:
        """Take STREAM.INFO, the stream's settings after the change, and the consumer before and after it."""
        self._first = int(stream["state"]["first_seq"])
        self._queue = settings.get("retention") == "workqueue"
        self._limit = (settings.get("consumer_limits") or {}).get("inactive_threshold") or 0
        self._actual, self._request = actual, request
        self._before, self._after = filters_of(actual.config), filters_of(request)
        self._others: list[tuple[tuple[str, ...], bool]] = []
        self._unmatched, self._only_here = DeletedMessages(), DeletedMessages()

    def add_consumer(self, other: Mapping[str, Any]) -> None:
        """Take the server's description of another consumer of the stream."""
        settings = other["config"]
        stays = settings.get("durable_name") and not settings.get("inactive_threshold")
        untouched = int(other["delivered"]["stream_seq"]) < self._first
        self._others.append((filters_of(settings), bool(stays and untouched)))

    def add(self, subject: str, count: int) -> None:
        """Take the number of stored messages of a subject."""
        old, new = matches(subject, self._before), matches(subject, self._after)
        others = [needs_all for filters, needs_all in self._others if matches(subject, filters)]
        needs = self._actual.pending + self._actual.unacked > 0
        only_here = not self._queue and not (any(others) if old and needs else others)
        past = not old and self._actual.delivered >= self._first and (self._queue or not others)
        if past if new else only_here:
            self._unmatched.add(subject, count, exact=not others and not new)
        if old and only_here:
            self._only_here.add(subject, count, exact=not others)

    def refusal(self, changes: Sequence[Difference]) -> tuple[str, str] | None:
        """Return the setting that would delete messages, "" if any change would, and why it is refused."""
        names = {change.name for change in changes}
        if self._unmatched.count:
            setting = "filter_subjects" if "filter_subjects" in names else ""
            if self._queue:
                why = (
                    f"the consumer is past {self._unmatched}: it would not receive them, and the server would delete "
                    "them; capture them with another consumer"
                )
            else:
                why = (
                    f"the server would delete {self._unmatched} that no other consumer is sure to need; capture them "
                    "first, or create another consumer for them"
                )
            return setting, why
        threshold = self._request.get("inactive_threshold") or self._limit
        old = self._actual.config.get("inactive_threshold")
        if self._only_here.count and _sooner(Difference(name="", wanted=threshold, actual=old)):
            idle = format_nanoseconds(threshold)
            deletes = f"the server would delete the consumer after {idle} without pulls, and with it {self._only_here}"
            if "inactive_threshold" in names:
                return "inactive_threshold", f"{deletes}; leave it out"
            return "", f"any change makes it take the stream's consumer_limits.inactive_threshold: {deletes}"
        return None
