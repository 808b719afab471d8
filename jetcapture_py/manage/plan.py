"""Plan the changes that make the stream and the consumer as configured.

A plan refuses what a server cannot change in place, what would delete messages, and what it is too old for. The server
refuses most of this itself, but only when the change is requested. Rules are those of nats-server 2.10 to 2.15
(`configUpdateCheck` of its stream.go, `checkNewConsumerConfig` of its consumer.go). What deletes messages of streams
with retention interest or workqueue was also measured, on 2.10.26 and 2.15.1, alone and in a cluster.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import reduce
from typing import Any, Literal

from jetcapture_py.config.buckets import new_stream
from jetcapture_py.config.model import Managed, SourceConfig
from jetcapture_py.config.stream import StreamSection, api_values
from jetcapture_py.config.subjects import matches
from jetcapture_py.config.units import format_nanoseconds
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.connection import CONSUMER_NOT_FOUND, STREAM_NOT_FOUND, ApiError
from jetcapture_py.jetstream.consumer import (
    ConsumerState,
    Difference,
    consumer_config,
    consumer_state,
    differences,
    differing,
    filters_of,
    is_ordered,
    normal,
    unusable,
)
from jetcapture_py.jetstream.read_session import ReadSession
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
    "priority_policy": "it can only be set when a consumer is created",
    "priority_groups": "it can only be set when a consumer is created",
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
        return tuple(int(part) for part in re.findall(r"\d+", self.version)[:2])

    def refusal(self, setting: str, value: Any) -> str | None:
        """Return why this server does not support the value; None if it does."""
        since = SINCE.get(setting)
        if since is not None and self.number < since and normal(setting, value) is not None:
            return f"nats-server {self.version} does not support it; {'.'.join(map(str, since))} does"
        if setting == "num_replicas" and not self.clustered and (value or 0) > 1:
            return "this server is not part of a cluster"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMessages:
    """A stream's stored messages."""

    messages: int
    """How many there are."""
    size: int
    """Their size in bytes."""
    oldest: timedelta
    """Age of the oldest one."""
    most_per_subject: int
    """How many the largest subject has."""
    copied: bool
    """Whether they come from other streams."""

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
        limit, what = change.configured or 0, None
        old = settings.get("discard", "old") == "old"
        if not self.messages:
            return None
        if change.name == "retention" and change.configured == "interest":
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
        elif old and change.name in ("max_msgs", "discard") and 0 < settings.get("max_msgs", -1) < self.messages:
            what = plural(self.messages - settings["max_msgs"], "message", grouped=True)
        elif old and change.name in ("max_bytes", "discard") and 0 < settings.get("max_bytes", -1) < self.size:
            what = "its oldest messages"
        return None if what is None else _DELETES.format(what)


def stream_refusal(change: Difference, actual: Mapping[str, Any], server: Server) -> str | None:
    """Return why a stream's setting cannot be changed in place; None if it can."""
    name, new, old = change.name, change.configured, change.actual
    if reason := server.refusal(name, new):
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
        for value in (change.configured, change.actual)
    )
    return bool(new) and (not old or new < old)


def consumer_refusal(change: Difference, actual: Mapping[str, Any], server: Server) -> str | None:
    """Return why a consumer's setting cannot be changed in place; None if it can."""
    if reason := server.refusal(change.name, change.configured):
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
        if self._only_here.count and _sooner(Difference(name="", configured=threshold, actual=old)):
            idle = format_nanoseconds(threshold)
            deletes = f"the server would delete the consumer after {idle} without pulls, and with it {self._only_here}"
            if "inactive_threshold" in names:
                return "inactive_threshold", f"{deletes}; leave it out"
            return "", f"any change makes it take the stream's consumer_limits.inactive_threshold: {deletes}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChange:
    """A setting's old and new value, None if not set; `refusal` is the reason why it cannot be changed."""

    name: str
    old: Any
    new: Any
    refusal: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The changes to a stream or consumer."""

    kind: Literal["stream", "consumer"]
    """What is changed."""
    name: str
    """Its name."""
    action: Literal["create", "update", "none"]
    """What to do."""
    changes: tuple[SettingChange, ...]
    """Settings that change."""
    request: dict[str, Any]
    """The whole configuration to request from the server."""
    configured: dict[str, Any]
    """The configured settings only."""
    refusal: str | None = None
    """Why it is impossible, if that is not about a single setting."""

    @property
    def possible(self) -> bool:
        """Whether nothing is refused."""
        return self.refusal is None and not any(change.refusal for change in self.changes)


async def plans(session: ReadSession, managed: Managed) -> list[Plan]:
    """Return the plans, the stream's first. Raises SourceError."""
    name = managed.stream_name
    answer = await info_or_none(session, f"STREAM.INFO.{name}", STREAM_NOT_FOUND)
    clustered = answer is None or bool((answer.get("cluster") or {}).get("name"))  # a new stream may be
    server = Server(version=session.connection.server_version, clustered=clustered)
    planned = []
    if managed.stream is not None:
        planned.append(await _stream_plan(session, managed, managed.stream, answer, server))
    elif answer is None:
        raise SourceError(f"stream {name} does not exist, and there is no section stream to create it from")
    if managed.source is not None:
        settings = planned[0].request if planned else answer["config"] if answer else {}
        planned.append(await _consumer_plan(session, managed.source, server, answer, settings))
    return planned


async def info_or_none(session: ReadSession, subject: str, missing: int) -> dict[str, Any] | None:
    """Return the answer of the JetStream API, None for the error `missing`. Raises SourceError."""
    try:
        return await session.request(subject)
    except SourceError as error:
        if isinstance(error.__cause__, ApiError) and error.__cause__.err_code == missing:
            return None
        raise


async def _stream_plan(
    session: ReadSession, managed: Managed, section: StreamSection, answer: Mapping[str, Any] | None, server: Server
) -> Plan:
    name, source = managed.stream_name, managed.source
    defaults = new_stream(*source.holds) if source is not None and source.holds is not None else {}
    configured = {**api_values(section), "name": name}
    if answer is None:
        request = {setting: value for setting, value in {**defaults, **configured}.items() if value is not None}
        return _created(
            "stream", name, configured, request, [setting for setting in request if setting != "name"], server
        )
    actual = answer["config"]
    differ = differing(configured, actual)
    request = _overlaid(actual, configured, differ)
    largest = 0
    if any(change.name == "max_msgs_per_subject" for change in differ):
        async for counts in _counts(session, name):
            largest = max(largest, *counts.values(), 0)
    stored = StoredMessages.of(answer, largest)

    def refusal(change: Difference) -> str | None:
        return stream_refusal(change, request, server) or stored.deleted_by(change, request)

    return Plan(
        kind="stream",
        name=name,
        action="update" if differ else "none",
        changes=_changes(differ, refusal),
        request=request,
        configured=configured,
    )


def _created(
    kind: Literal["stream", "consumer"],
    name: str,
    configured: dict[str, Any],
    request: dict[str, Any],
    settings: Iterable[str],
    server: Server,
) -> Plan:
    """Plan to create with `request`, of which `settings` are shown."""
    differ = [Difference(name=setting, configured=request[setting], actual=None) for setting in settings]
    changes = _changes(differ, lambda change: server.refusal(change.name, change.configured))
    return Plan(kind=kind, name=name, action="create", changes=changes, request=request, configured=configured)


def _changes(differ: Iterable[Difference], refusal: Callable[[Difference], str | None]) -> tuple[SettingChange, ...]:
    return tuple(
        SettingChange(name=change.name, old=change.actual, new=change.configured, refusal=refusal(change))
        for change in differ
    )


async def _parts(session: ReadSession, subject: str, *path: str, **body: str) -> AsyncIterator[Any]:
    """Yield what is at `path` in the server's answers, of which each has a part."""
    offset, total = 0, 1
    while offset < total:
        answer = await session.request(subject, {**body, "offset": offset})
        part = reduce(lambda inner, name: inner.get(name) or {}, path, answer)
        yield part
        offset, total = offset + max(len(part), 1), answer.get("total", 0)


def _counts(session: ReadSession, name: str) -> AsyncIterator[dict[str, int]]:
    """Return the numbers of stored messages by subject, in parts."""
    return _parts(session, f"STREAM.INFO.{name}", "state", "subjects", subjects_filter=">")


async def _consumer_plan(
    session: ReadSession,
    source: SourceConfig,
    server: Server,
    stream: Mapping[str, Any] | None,
    settings: Mapping[str, Any],
) -> Plan:
    """Plan the consumer; `settings` are those that the stream then has."""
    name = source.consumer
    configured = consumer_config(source)
    subject = f"CONSUMER.INFO.{source.stream}.{name}"
    answer = None if stream is None else await info_or_none(session, subject, CONSUMER_NOT_FOUND)
    if stream is None or answer is None:
        names = [setting for setting, value in configured.items() if normal(setting, value) is not None]
        shown = [setting for setting in names if setting not in ("name", "durable_name")]
        return _created("consumer", name, configured, configured, shown, server)
    actual = answer["config"]
    differ = differences(source, actual)
    request = _overlaid(actual, configured, differ)
    setting, deletes = await _deleted(session, stream, settings, answer, request, differ)

    def refusal(change: Difference) -> str | None:
        return consumer_refusal(change, actual, server) or (deletes if setting in ("", change.name) else None)

    return Plan(
        kind="consumer",
        name=name,
        action="update" if differ else "none",
        changes=_changes(differ, refusal),
        request=request,
        configured=configured,
        refusal=_other_mode(source, consumer_state(dict(answer))) or unusable(source.stream, name, actual, source.mode),
    )


def _other_mode(source: SourceConfig, consumer: ConsumerState) -> str | None:
    """Return how to go over from the consumer's `source.mode` to the configured one; None if it is the same."""
    ordered = is_ordered(consumer.config)
    if ordered == (source.mode == "ordered") or unusable(
        source.stream, source.consumer, consumer.config, "ordered" if ordered else "shared"
    ):
        return None
    wait = f" (it has {plural(consumer.unacked, 'unacknowledged message', grouped=True)})" if consumer.unacked else ""
    return (
        f"a consumer cannot be changed to source.mode {source.mode}: drain its captures{wait}, then set "
        "source.consumer to a new name, deliver_policy to by_start_sequence and start_sequence to its ack floor + 1, "
        f"which is now {consumer.ack_floor + 1}"
    )


async def _deleted(
    session: ReadSession,
    stream: Mapping[str, Any],
    settings: Mapping[str, Any],
    consumer: Mapping[str, Any],
    request: Mapping[str, Any],
    differ: list[Difference],
) -> tuple[str, str | None]:
    """Return the setting of the consumer that would delete stored messages, "" if any would, and why it is refused."""
    retention = settings.get("retention", "limits")
    filters = any(difference.name == "filter_subjects" for difference in differ)
    if (
        not differ
        or not stream["state"]["messages"]
        or not (retention == "interest" or (retention == "workqueue" and filters))
    ):
        return "", None
    name = stream["config"]["name"]
    change = ConsumerChange(stream, settings, consumer_state(dict(consumer)), request)
    async for others in _parts(session, f"CONSUMER.LIST.{name}", "consumers"):
        for other in others:
            if other["name"] != consumer["name"]:
                change.add_consumer(other)
    async for counts in _counts(session, name):
        for subject, count in counts.items():
            change.add(subject, count)
    return change.refusal(differ) or ("", None)


def _overlaid(
    actual: Mapping[str, Any], configured: Mapping[str, Any], changes: Iterable[Difference]
) -> dict[str, Any]:
    """Return the server's configuration with the changes applied; None removes a setting."""
    request = dict(actual)
    for change in changes:
        name = change.name.partition(".")[0]
        request[name] = configured[name] if name == "metadata" else change.configured
        if name == "filter_subjects":
            request.pop("filter_subject", None)
    return {name: value for name, value in request.items() if value is not None}
