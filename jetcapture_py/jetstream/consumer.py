"""The consumer on the server: find or create it, compare it with the configuration, detect a recreated one."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from jetcapture_py.archive.incarnations import Origin, Progress, is_same_stream
from jetcapture_py.archive.watermark import ConsumerWatermark
from jetcapture_py.config.buckets import bucket_of
from jetcapture_py.config.model import SourceConfig
from jetcapture_py.config.stream import api_values
from jetcapture_py.config.units import RFC3339, format_nanoseconds, format_time, microseconds_of
from jetcapture_py.errors import (
    ApiError,
    DeniedError,
    MissingConsumerError,
    MissingError,
    MissingStreamError,
    SourceError,
)
from jetcapture_py.jetstream import ordered_consumer
from jetcapture_py.jetstream.connection import Api
from jetcapture_py.jetstream.consumer_watch import ConsumerWatch
from jetcapture_py.jetstream.link import Link
from jetcapture_py.jetstream.read_session import StreamState
from jetcapture_py.jetstream.unreadable import LAST_SEQ, unreadable, unreadable_with_origins
from jetcapture_py.log import event

_OWN_METADATA = "_nats."
"""Metadata that the server writes itself."""
_MEANS_NOTHING = {
    "compression": "none",
    "deliver_policy": "",
    "discard": "old",
    "persist_mode": "default",
    "priority_policy": "none",
    "replay_policy": "instant",
    "retention": "limits",
    "storage": "file",
    "src": ">",
}
"""Values that mean the same as a missing setting."""
_UNORDERED = frozenset({"subjects", "filter_subjects", "sources", "tags"})
_NO_TIME = "0001-01-01T00:00:00Z"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A setting with another value than the configured one, both in the API's form; None for a missing one."""

    name: str
    configured: Any
    actual: Any


def differing(configured: Mapping[str, Any], actual: Mapping[str, Any]) -> list[Difference]:
    """Compare the settings in `configured` with the server's answer; other settings are ignored.

    Equivalent settings are not differences: the server leaves an unset one out, or writes 0, -1 or an empty list, and
    adds its own metadata. Metadata is compared name by name.
    """
    result = []
    for name, value in configured.items():
        before = actual.get(name)
        if normal(name, value) == normal(name, before):
            continue
        if name == "metadata":
            new, old = normal(name, value) or {}, normal(name, before) or {}
            result += [
                Difference(name=f"metadata.{key}", configured=new.get(key), actual=old.get(key))
                for key in sorted({**old, **new})
                if new.get(key) != old.get(key)
            ]
        else:
            result.append(Difference(name=name, configured=value, actual=before))
    return result


def normal(name: str, value: Any) -> Any:
    """Return the value's normal form, in which equivalent settings are equal; None if unset."""
    if isinstance(value, Mapping):
        if name == "metadata":
            return {key: text for key, text in value.items() if not key.startswith(_OWN_METADATA)} or None
        settings = {key: normal(key, part) for key, part in value.items()}
        return {key: part for key, part in sorted(settings.items()) if part is not None} or None
    if isinstance(value, list | tuple):
        parts = [normal("", part) for part in value]
        return (sorted(parts, key=json.dumps) if name in _UNORDERED else parts) or None
    if isinstance(value, str) and RFC3339.fullmatch(value):
        return None if value == _NO_TIME else utc(value)
    if value in (None, "", 0, -1, _MEANS_NOTHING.get(name)):  # False == 0
        return None
    return value


def utc(text: str) -> str:
    """Return a time of RFC 3339 in UTC, with no more digits than it needs."""
    match = RFC3339.fullmatch(text)
    if match is None:
        return text
    moment = datetime.fromisoformat(f"{match[1]}{match[3]}".upper()).astimezone(UTC)
    fraction = (match[2] or "").rstrip("0").rstrip(".")
    return f"{moment:%Y-%m-%dT%H:%M:%S}{fraction}Z"


WRONG_CLOCK = 60.0
"""Clock difference to the server, in seconds, from which signed requests fail and ages are wrong."""
_CONSUMER_EXISTS = (10148, 10105)
_NANOSECOND = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerState:
    """The server's description of the consumer. Times in seconds, sizes in bytes; 0 is no limit.

    Attributes:
        config: Its settings as the JetStream API has them.
        pending: Messages that wait to be delivered.
        unacked: Messages delivered to any replica and not acknowledged.
        ack_wait: Shortest time after which an unacknowledged message is redelivered.
        max_ack_pending: Maximum of `unacked`.
        max_waiting: Maximum of `waiting_pulls`.
        max_batch: Maximum messages that a pull may ask for.
        max_bytes: Maximum bytes that a pull may ask for.
        max_expires: Maximum expiry of a pull.
        ack_floor: Stream sequence up to which nothing is pending or unacknowledged.
        asked: The server's time of the answer.
        answered: The same moment by this process's monotonic clock.
        ahead: Seconds that this machine's clock was ahead of the server's then.
        delivered: Last stream sequence delivered.
        acknowledged: Deliveries up to the ack floor.
        deliveries: All deliveries, redeliveries included.
        redelivered: Unacknowledged messages that were delivered more than once.
        waiting_pulls: Open pulls of all replicas.
        paused: Whether delivery is paused.
        created: Creation time, as the server writes it; it distinguishes consumers of the same name.
        leader: The server that leads the consumer; "" without a cluster.
        pinned: The pin id of the client that the consumer is pinned to; "" for none.
        takeover: Time after which the server unpins a client that does not pull.
        last_ack: Time of the last acknowledgement; None if the server does not know it, as after a restart.
    """

    config: dict[str, Any]
    pending: int
    unacked: int
    ack_wait: float
    max_ack_pending: int
    max_waiting: int
    max_batch: int
    max_bytes: int
    max_expires: float
    ack_floor: int
    asked: datetime
    answered: float = field(default_factory=time.monotonic, compare=False)
    ahead: float = field(default=0.0, compare=False)
    delivered: int = 0
    acknowledged: int = 0
    deliveries: int = 0
    redelivered: int = 0
    waiting_pulls: int = 0
    paused: bool = False
    created: str = ""
    leader: str = ""
    pinned: str = ""
    takeover: float = 0.0
    last_ack: datetime | None = None

    @property
    def progress(self) -> Progress:
        """The consumer's progress; a new consumer starts again."""
        return Progress(self.deliveries, self.ack_floor)


def pending_of(info: Mapping[str, Any]) -> int:
    """Return the number of undelivered messages; 0 for an impossible count, which some servers report."""
    count = int(info.get("num_pending", 0))
    return count if 0 < count <= LAST_SEQ else 0


def consumer_state(info: dict[str, Any]) -> ConsumerState:
    """Read the server's answer to CONSUMER.INFO or CONSUMER.CREATE."""
    config, delivered, acknowledged = info["config"], info.get("delivered", {}), info.get("ack_floor", {})
    waits = [config.get("ack_wait", 30 * _NANOSECOND), *config.get("backoff", [])]
    max_ack_pending, last_ack = config.get("max_ack_pending", 1000), acknowledged.get("last_active")
    asked = datetime.fromisoformat(info["ts"]) if "ts" in info else datetime.now(UTC)
    return ConsumerState(
        config=config,
        pending=pending_of(info),
        unacked=info.get("num_ack_pending", 0),
        ack_wait=min(wait for wait in waits if wait > 0) / _NANOSECOND,
        max_ack_pending=max_ack_pending if max_ack_pending > 0 else 1 << 62,
        max_waiting=max(0, config.get("max_waiting", 0)),
        max_batch=config.get("max_batch", 0),
        max_bytes=config.get("max_bytes", 0),
        max_expires=config.get("max_expires", 0) / _NANOSECOND,
        ack_floor=acknowledged.get("stream_seq", 0),
        asked=asked,
        ahead=(datetime.now(UTC) - asked).total_seconds(),
        delivered=delivered.get("stream_seq", 0),
        acknowledged=acknowledged.get("consumer_seq", 0),
        deliveries=delivered.get("consumer_seq", 0),
        redelivered=info.get("num_redelivered", 0),
        waiting_pulls=info.get("num_waiting", 0),
        paused=bool(info.get("paused")),
        created=info.get("created", ""),
        leader=(info.get("cluster") or {}).get("leader", ""),
        pinned=next((group.get("pinned_client_id", "") for group in info.get("priority_groups") or ()), ""),
        takeover=config.get("priority_timeout", 0) / _NANOSECOND,
        last_ack=datetime.fromisoformat(last_ack) if last_ack else None,
    )


def is_consumer_of(state: ConsumerState, mark: ConsumerWatermark) -> bool:
    """Whether this is the watermark's consumer: the same creation time, which servers may move, or no less progress."""
    if mark.filters and mark.filters[-1].consumer == state.created:
        return True
    return bool(mark.deliveries) and state.progress.continues(Progress(mark.deliveries, mark.seq))


async def get_consumer(api: Api, stream: str, consumer: str) -> ConsumerState:
    """Return the consumer's state. Raises SourceError."""
    try:
        return consumer_state(await api.request(f"CONSUMER.INFO.{stream}.{consumer}"))
    except MissingError as error:
        raise _named(error, stream, consumer) from error


def filters_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the filter subjects of a consumer with this API configuration; none for all."""
    one = config.get("filter_subject")
    return (one,) if one else tuple(config.get("filter_subjects", ()))


YEAR = 365 * 24 * 3600 * 10**9
"""Nanoseconds; longer than any stop of a capture."""


def deleted_when_idle(consumer: Mapping[str, Any], stream: Mapping[str, Any]) -> str | None:
    """Say in one line when the server deletes an idle consumer; None if not within a year.

    Both arguments are API configurations; the stream's is empty if unknown. A consumer takes the stream's limit
    unless it has a shorter threshold; 0 does not turn that off. Servers before 2.14 refuse the stream's limit
    without one for `max_ack_pending`.
    """
    limit = (stream.get("consumer_limits") or {}).get("inactive_threshold") or 0
    threshold = consumer.get("inactive_threshold") or limit
    if not 0 < threshold < YEAR:
        return None
    interest = ", with the messages that only it needs," if stream.get("retention") == "interest" else ""
    both = " and stream.consumer_limits (before nats-server 2.14 with max_ack_pending)" if limit or not stream else ""
    return (
        f"the server deletes the consumer{interest} if no replica pulls for {format_nanoseconds(threshold)}; set "
        f"inactive_threshold to 36500d in source.consumer_config{both}, and run jetcapture apply"
    )


def unusable(stream: str, consumer: str, config: Mapping[str, Any], mode: str = "shared") -> str | None:
    """Return in one line why a consumer with this configuration does not suit this `source.mode`; None if it does."""
    problem = ordered_consumer.unusable(config) if mode == "ordered" else _not_shared(config)
    if config.get("deliver_subject"):
        problem = "is a push consumer; a pull consumer is required"
    elif problem is None and config.get("headers_only"):
        problem = "has headers_only set; it must be off, or messages are delivered without their payload"
    return problem and f"consumer {consumer} of stream {stream} {problem}"


def _not_shared(config: Mapping[str, Any]) -> str | None:
    """Return a consumer's problem in `source.mode: shared`; None without one."""
    if ordered_consumer.is_ordered(config):
        return "is one for source.mode ordered; set that, or use another consumer"
    if config.get("ack_policy") != "explicit":
        handled = "explicit is required, or messages count as handled before they are stored"
        return f"has ack_policy {config.get('ack_policy')}; {handled}"
    if config.get("priority_policy", "none") != "none":
        return f"has priority groups ({config['priority_policy']}); source.mode shared pulls without a group"
    return None


async def _create(api: Api, source: SourceConfig) -> ConsumerState:
    stream, consumer = source.stream, source.consumer
    request = {"stream_name": stream, "config": consumer_config(source), "action": "create"}
    try:
        return consumer_state(await api.request(f"CONSUMER.CREATE.{stream}.{consumer}", request))
    except ApiError as error:
        if error.err_code in _CONSUMER_EXISTS:  # another replica created it first, with other settings
            return await get_consumer(api, stream, consumer)
        raise


def consumer_config(source: SourceConfig) -> dict[str, Any]:
    """Return the consumer's configuration for the JetStream API (ADR-13); durations in nanoseconds."""
    config: dict[str, Any] = {
        "name": source.consumer,
        "durable_name": source.consumer,
        "deliver_policy": source.deliver_policy,
        "ack_policy": "explicit",
        "ack_wait": round(source.ack_wait * _NANOSECOND),
        "max_deliver": -1,
        "max_ack_pending": source.max_ack_pending,
        "replay_policy": source.replay_policy,
    }
    if source.mode == "ordered":
        config |= ordered_consumer.settings(source.takeover)
    if source.start_sequence is not None:
        config["opt_start_seq"] = source.start_sequence
    if source.start_time is not None:
        config["opt_start_time"] = format_time(source.start_time)
    if len(source.filter_subjects) == 1:
        config["filter_subject"] = source.filter_subjects[0]
    elif source.filter_subjects:
        config["filter_subjects"] = list(source.filter_subjects)
    elif source.deliver_policy == "last_per_subject":
        config["filter_subject"] = ">"  # the server needs the subjects
    if source.consumer_config is not None:
        config |= {name: value for name, value in api_values(source.consumer_config).items() if value is not None}
    if config.get("backoff"):
        config["ack_wait"] = config["backoff"][0]  # as the server then stores it
    return config


def differences(source: SourceConfig, actual: Mapping[str, Any]) -> list[Difference]:
    """Return the settings whose value on the server (`actual`) is not the configured one."""
    configured = consumer_config(source)
    for config in (configured, actual := dict(actual)):
        config["filter_subjects"] = filters_of(config)
        config.pop("filter_subject", None)
        if "opt_start_time" in config:  # to the microsecond, as `source.start_time` is
            config["opt_start_time"] = format_time(datetime.fromisoformat(config["opt_start_time"]))
    return differing(configured, actual)


def _named(error: MissingError, stream: str, consumer: str = "") -> MissingError:
    """Return the error with the names of stream and consumer."""
    if isinstance(error, MissingStreamError):
        setting, _ = bucket_of(stream) or ("stream", "")
        return MissingStreamError(f"stream {stream} does not exist; create it, or correct source.{setting}")
    return MissingConsumerError(f"consumer {consumer} does not exist on stream {stream}")


log = logging.getLogger("jetcapture.source")


class Consumer:
    """One consumer and its last known `state`. A permanent problem fails the capture through `link`."""

    def __init__(self, link: Link, config: SourceConfig) -> None:
        self.link, self._config = link, config
        self.origin = Origin("")
        """The stream; without a creation time if permission to read it is missing."""
        self.stream_config: Mapping[str, Any] = {}
        """The stream's configuration as last seen, empty without permission to ask."""
        self.state: ConsumerState
        self._stream_state: StreamState | None = None
        self._may_get = True  # False once STREAM.MSG.GET was denied

    async def attach(self) -> None:
        """Find or create the consumer. Raises SourceError."""
        await self._ensure()
        self._watch = ConsumerWatch(self.state.progress, asyncio.get_running_loop().time())
        for difference in differences(self._config, self.state.config):
            event(
                log,
                logging.WARNING,
                "consumer.differs",
                setting=difference.name,
                configured=difference.configured,
                actual=difference.actual,
            )
        self._warn_of_max_deliver(self.state)
        self._warn_of_pause(self.state)
        if text := deleted_when_idle(self.state.config, self.stream_config):
            event(log, logging.WARNING, "consumer.inactive_threshold", reason=text)

    async def _ensure(self) -> None:
        """Find the durable consumer; create it if it is missing and `source.create` is set. Raises SourceError."""
        api, source = self.link.api, self._config
        stream, consumer = source.stream, source.consumer
        state: ConsumerState | None = None
        try:
            state = await get_consumer(api, stream, consumer)
        except MissingConsumerError:
            if not source.create:
                raise
        if (info := await self._stream_answer()) is not None:  # before anything is created on it
            if problem := await unreadable_with_origins(api, info):
                raise SourceError(problem)
            self.stream_config, self._stream_state = info["config"], StreamState.of(info)
            self.origin = self._stream_state.origin
        self.state = state or await _create(api, source)
        if problem := unusable(stream, consumer, self.state.config, source.mode):
            raise SourceError(problem)

    async def _stream_answer(self) -> dict[str, Any] | None:
        """Return the answer to STREAM.INFO, None without permission to ask. Raises SourceError."""
        try:
            return await self.link.api.request(f"STREAM.INFO.{self._config.stream}")
        except MissingStreamError as error:
            raise _named(error, self._config.stream) from error
        except ApiError:
            return None

    async def stream_info(self) -> dict[str, Any] | None:
        """Return the answer to STREAM.INFO; None without permission or answer. Fail if the stream cannot be read."""
        try:
            answer = await self._stream_answer()
        except SourceError:
            return None
        if answer is not None:
            if problem := unreadable(self.link.api, answer):
                self.link.fail(SourceError(problem))
            self.stream_config = answer["config"]
            await self._is_same_stream(StreamState.of(answer))
        return answer

    async def stream_subjects(self) -> tuple[str, ...]:
        """Return the stream's subjects; none without permission to read the stream."""
        answer = await self.stream_info() if self.origin.created else None
        return tuple(answer["config"].get("subjects", ())) if answer is not None else ()

    @property
    def stream_max_age(self) -> float:
        """Seconds after which the stream removes a message; 0 for never, or unknown."""
        return float(self.stream_config.get("max_age", 0)) / _NANOSECOND

    async def _is_same_stream(self, state: StreamState, *, progressed: bool = False) -> bool:
        """Whether the stream is still the one that the consumer was attached to."""
        origin = self._stream_state.origin if self._stream_state is not None else Origin("")
        if same := await is_same_stream(origin, state.ends, self._time_of, progressed=progressed):
            self._stream_state = state
            self.origin = replace(self.origin, sample=state.ends.sample)
        return same

    async def recognize(self, origin: Origin, *, progressed: bool = False) -> bool:
        """Whether the stream is that of `origin`; if so, use that creation time from now on. `progressed` as in
        `is_same_stream`."""
        stream = self._stream_state
        if stream is None or not await is_same_stream(origin, stream.ends, self._time_of, progressed=progressed):
            return False
        self.origin = replace(self.origin, created=origin.created)
        return True

    async def _is_same(self, continues: bool | None) -> bool:
        """Whether a consumer with another creation time is still the same. Raises SourceError."""
        if continues is False:
            return False
        if (answer := await self._stream_answer()) is None:
            return bool(continues)
        return await self._is_same_stream(StreamState.of(answer), progressed=bool(continues))

    async def refresh(self) -> bool:
        """Update the state; return False without an answer, or if the consumer has become unusable."""
        stream, name = self._config.stream, self._config.consumer
        try:
            state = await get_consumer(self.link.api, stream, name)
        except SourceError as error:
            if not isinstance(error, MissingError):
                event(log, logging.DEBUG, "consumer.unavailable", error=error)
            elif self._watch.is_gone(asyncio.get_running_loop().time()):
                self.link.fail(error)
            return False
        continues = self._watch.continues(state.progress, asyncio.get_running_loop().time())
        try:
            same = state.created == self.state.created or await self._is_same(continues)
        except SourceError as error:
            event(log, logging.DEBUG, "consumer.unavailable", error=error)
            return False
        if not same:
            remedy = "restart to capture from the new one, then run jetcapture verify"
            self.link.fail(SourceError(f"consumer {name} of stream {stream} was deleted and created again; {remedy}"))
            return False
        if problem := unusable(stream, name, state.config, self._config.mode):
            self.link.fail(SourceError(problem))
            return False
        self._report_changes(state)
        self.state = state
        return True

    async def delivered_all(self) -> bool:
        """Whether the stream has no further message for it, whatever the server counts as pending."""
        if not self._may_get:
            return False
        filters = filters_of(self.state.config)
        try:
            return await self.link.api.next_match(self._config.stream, self.state.delivered + 1, filters) is None
        except SourceError as error:
            self._may_get = not isinstance(error, DeniedError)
            return False

    async def is_other(self, seq: int, timestamp: int) -> bool:
        """Whether the message at `seq` has another timestamp than `timestamp` (microseconds); False if unknown."""
        return await self._time_of(seq) not in (None, timestamp)

    async def _time_of(self, seq: int) -> int | None:
        """Return the timestamp of a message in microseconds; None without message, permission or answer."""
        try:
            message = await self.link.api.message(self._config.stream, seq=seq)
        except SourceError:
            return None
        return None if message is None else microseconds_of(datetime.fromisoformat(message["time"]))

    def _report_changes(self, state: ConsumerState) -> None:
        old, new = self.state.config, state.config
        if changed := {name: new.get(name) for name in {*old, *new} if old.get(name) != new.get(name)}:
            event(log, logging.WARNING, "consumer.changed", settings=changed)
            if "max_deliver" in changed:
                self._warn_of_max_deliver(state)
            self._warn_of_pause(state)

    def _warn_of_max_deliver(self, state: ConsumerState) -> None:
        if (limit := state.config.get("max_deliver", -1)) > 0:
            event(log, logging.WARNING, "consumer.max_deliver", max_deliver=limit)

    def _warn_of_pause(self, state: ConsumerState) -> None:
        if state.paused:
            event(log, logging.WARNING, "consumer.paused", until=state.config.get("pause_until"))
