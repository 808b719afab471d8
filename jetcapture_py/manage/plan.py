"""Plan the changes that bring the stream and the consumer to their configuration.

A change is harmless if the stream keeps its messages and accepts the same subjects, and the consumer keeps its
position. All other changes may delete messages, whatever the stream holds, and need the user's consent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jetcapture_py.config.buckets import new_stream
from jetcapture_py.config.model import Config, SourceConfig
from jetcapture_py.config.stream import StreamSection, api_values
from jetcapture_py.config.subjects import covers
from jetcapture_py.config.units import format_nanoseconds
from jetcapture_py.errors import MissingError, SourceError
from jetcapture_py.jetstream.consumer import (
    YEAR,
    ConsumerState,
    Difference,
    consumer_config,
    consumer_state,
    differences,
    differing,
    normal,
    unusable,
)
from jetcapture_py.jetstream.ordered_consumer import is_ordered
from jetcapture_py.jetstream.read_session import ReadSession
from jetcapture_py.text import plural

Rule = Callable[[Any, Any], bool]
"""Whether changing a setting from one value to another is harmless; both in the API's form, None for a missing one."""


def higher(old: Any, new: Any) -> bool:
    """Whether a limit is not lowered; None, 0 and -1 are no limit."""
    return (new or 0) <= 0 or 0 < (old or 0) <= new


def longer_idle(old: Any, new: Any) -> bool:
    """Whether an idle consumer is deleted no sooner."""
    return higher(old, new) or bool(new >= YEAR)


def wider(old: Any, new: Any) -> bool:
    """Whether all subjects are still stored."""
    return all(any(covers(pattern, subject) for pattern in new or ()) for subject in old or ())


def later_deletion(old: Any, new: Any) -> bool:
    """Whether a stream's limits delete idle consumers no sooner. Other changes of limits only refuse consumers."""
    return longer_idle((old or {}).get("inactive_threshold"), (new or {}).get("inactive_threshold"))


HARMLESS = {
    "stream": frozenset({"description", "metadata", "compression", "republish", "deny_delete", "deny_purge"})
    | {"allow_direct", "mirror_direct"},
    "consumer": frozenset({"description", "metadata", "ack_wait", "max_ack_pending", "backoff", "sample_freq"})
    | {"max_batch", "max_expires", "max_bytes", "pause_until", "priority_timeout"},
}
"""Settings whose changes delete nothing."""
RULES: dict[str, dict[str, tuple[Rule | None, str]]] = {
    "stream": {
        "subjects": (wider, "messages of other subjects are no longer stored"),
        "retention": (lambda _, new: new == "limits", "messages that no consumer needs are deleted"),
        "max_consumers": (higher, "consumers are refused"),
        "max_msgs": (higher, "the oldest messages are deleted"),
        "max_bytes": (higher, "the oldest messages are deleted"),
        "max_age": (higher, "older messages are deleted"),
        "max_msgs_per_subject": (higher, "the oldest messages of a subject are deleted"),
        "max_msg_size": (higher, "larger messages are refused"),
        "discard": (None, "it decides which messages go at a limit, old or new ones"),
        "discard_new_per_subject": (None, "it decides which messages go at a limit, old or new ones"),
        "num_replicas": (higher, "fewer servers hold the messages"),
        "no_ack": (lambda _, new: not new, "publishers do not learn that a message was not stored"),
        "duplicate_window": (lambda old, new: higher(new, old), "more messages are dropped as duplicates"),
        "placement": (None, "the messages move to other servers"),
        "mirror": (None, "messages of its origin are no longer copied"),
        "sources": (None, "it copies other messages, and its limits may delete some for them"),
        "subject_transform": (None, "new messages have other subjects, with limits and consumers of their own"),
        "sealed": (None, "new messages are refused, permanently"),
        "allow_rollup_hdrs": (None, "messages with the header Nats-Rollup delete earlier ones, or are refused"),
        "allow_msg_ttl": (None, "messages whose own TTL is over are deleted"),
        "subject_delete_marker_ttl": (None, "markers of removed messages are stored, and deleted again"),
        "allow_msg_schedules": (None, "scheduled messages are deleted when they are due"),
        "allow_atomic": (lambda _, new: new, "atomic batches are refused"),
        "allow_batched": (lambda _, new: new, "fast batches are refused"),
        "consumer_limits": (later_deletion, "idle consumers are deleted sooner, with their position"),
    },
    "consumer": {
        "filter_subjects": (None, "the server deletes messages that no consumer of this stream is to receive"),
        "max_deliver": (higher, "the consumer gives up on messages sooner, and the archive misses them"),
        "inactive_threshold": (longer_idle, "the server deletes an idle consumer sooner, with its position"),
        "num_replicas": (higher, "fewer servers hold the consumer's position"),
    },
}
"""Rules of other settings: when a change is harmless (None: never), and its possible effect otherwise."""
FIXED = {
    "stream": frozenset({"storage", "allow_msg_counter", "persist_mode", "first_seq"}),
    "consumer": frozenset({"deliver_policy", "opt_start_seq", "opt_start_time", "replay_policy", "ack_policy"})
    | {"priority_policy", "priority_groups", "max_waiting", "mem_storage"},
}
"""Settings that can only be set at creation."""
STAYS_ON = frozenset({"sealed", "deny_delete", "deny_purge", "allow_msg_ttl", "allow_msg_schedules"})

Kind = Literal["stream", "consumer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChange:
    """A setting's old and new value, None if not set."""

    setting: str
    old: Any
    new: Any
    refusal: str | None = None
    """Reason for refusing it."""
    may_delete: str | None = None
    """Why it may delete messages."""
    left: bool = False
    """Whether the change is left out because it may delete messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The changes to a stream or consumer."""

    kind: Kind
    """Stream or consumer."""
    name: str
    """Its name."""
    action: Literal["create", "update", "none"]
    """What to request from the server."""
    changes: Sequence[SettingChange]
    """Settings that differ."""
    refusal: str | None = None
    """Why it is impossible, unless a single setting is the reason."""
    request: dict[str, Any]
    """The complete configuration to request from the server, without left-out changes."""

    @property
    def possible(self) -> bool:
        """Whether nothing is refused."""
        return self.refusal is None and not any(change.refusal for change in self.changes)

    @property
    def left(self) -> int:
        """Number of left-out changes."""
        return sum(change.left for change in self.changes)

    @property
    def requests(self) -> bool:
        """Whether anything is requested from the server."""
        return self.action == "create" or len(self.changes) > self.left


async def plans(session: ReadSession, config: Config, *, may_delete: bool = False) -> list[Plan]:
    """Return the plans, the stream's first; with `may_delete`, nothing is left out. Raises SourceError."""
    name = config.source.stream
    answer = await info_or_none(session, f"STREAM.INFO.{name}")
    actual = answer["config"] if answer is not None else None
    planned = []
    if config.stream is not None:
        planned.append(_stream_plan(config.source, config.stream, actual, may_delete=may_delete))
    elif actual is None:
        raise SourceError(f"stream {name} does not exist, and there is no section stream to create it from")
    if config.source.consumer:
        subject = f"CONSUMER.INFO.{name}.{config.source.consumer}"
        info = None if actual is None else await info_or_none(session, subject)
        settings = planned[0].request if planned else actual or {}
        planned.append(_consumer_plan(config.source, info, settings, may_delete=may_delete))
    return planned


async def info_or_none(session: ReadSession, subject: str) -> dict[str, Any] | None:
    """Return the answer of the JetStream API; None if the stream or consumer is missing. Raises SourceError."""
    try:
        return await session.request(subject)
    except MissingError:
        return None


def _stream_plan(
    source: SourceConfig, section: StreamSection, actual: Mapping[str, Any] | None, *, may_delete: bool
) -> Plan:
    configured = {**api_values(section), "name": source.stream}
    if actual is None:
        defaults = {} if source.holds is None else new_stream(*source.holds)
        return _created("stream", source.stream, {**defaults, **configured})
    changes = _left(map(stream_change, differing(configured, actual)), may_delete=may_delete)
    return _updated("stream", source.stream, configured, actual, changes)


def _consumer_plan(
    source: SourceConfig, info: dict[str, Any] | None, stream: Mapping[str, Any], *, may_delete: bool
) -> Plan:
    """Plan the consumer; `stream` are the settings of its stream after the change."""
    name, configured = source.consumer, consumer_config(source)
    if info is None:
        return _created("consumer", name, configured)
    actual = info["config"]
    changes = _left(consumer_changes(differences(source, actual), actual, stream), may_delete=may_delete)
    mode = _other_mode(source, consumer_state(info)) or unusable(source.stream, name, actual, source.mode)
    return _updated("consumer", name, configured, actual, changes, mode)


def stream_change(difference: Difference) -> SettingChange:
    """Classify a change of a stream."""
    name, new, old = difference.name, difference.configured, difference.actual
    refusal = None
    if name == "mirror" and normal(name, new) is not None:
        refusal = "it can only be set when a stream is created"
    elif name == "retention" and "workqueue" in (new, old):
        refusal = "a stream cannot be changed to or from a work queue"
    elif name in STAYS_ON and old:
        refusal = "it cannot be turned off again"
    return _judged("stream", difference, refusal)


def consumer_changes(
    differ: Sequence[Difference], actual: Mapping[str, Any], stream: Mapping[str, Any]
) -> list[SettingChange]:
    """Classify changes of a consumer with the settings `actual`, of a stream with the settings `stream`."""
    changes = [_judged("consumer", difference) for difference in differ]
    if stream.get("retention", "limits") == "limits":
        changes = [
            replace(change, may_delete=None) if change.setting == "filter_subjects" else change for change in changes
        ]
    limit = (stream.get("consumer_limits") or {}).get("inactive_threshold") or 0
    threshold = next((change.new for change in changes if change.setting == "inactive_threshold"), 0) or 0
    if not actual.get("inactive_threshold") and 0 < limit < YEAR > threshold:
        idle = format_nanoseconds(limit)
        taken = f"any change makes the consumer take the stream's consumer_limits.inactive_threshold: {idle}"
        changes = [replace(change, may_delete=taken) for change in changes]
    return changes


def _judged(kind: Kind, difference: Difference, refusal: str | None = None) -> SettingChange:
    name = difference.name.partition(".")[0]
    if name in FIXED[kind]:
        refusal = f"it can only be set when a {kind} is created"
    risk = None
    if refusal is None and name not in HARMLESS[kind]:
        harmless, reason = RULES[kind][name]
        if harmless is None or not harmless(difference.actual, difference.configured):
            risk = reason
    return SettingChange(
        setting=difference.name, old=difference.actual, new=difference.configured, refusal=refusal, may_delete=risk
    )


def _left(changes: Iterable[SettingChange], *, may_delete: bool) -> list[SettingChange]:
    return [replace(change, left=change.may_delete is not None and not may_delete) for change in changes]


def _created(kind: Kind, name: str, configured: Mapping[str, Any]) -> Plan:
    request = {setting: value for setting, value in configured.items() if value is not None}
    changes = [
        SettingChange(setting=setting, old=None, new=value)
        for setting, value in request.items()
        if setting not in ("name", "durable_name") and normal(setting, value) is not None
    ]
    return Plan(kind=kind, name=name, action="create", changes=changes, request=request)


def _updated(
    kind: Kind,
    name: str,
    configured: Mapping[str, Any],
    actual: Mapping[str, Any],
    changes: Sequence[SettingChange],
    refusal: str | None = None,
) -> Plan:
    request = dict(actual)  # None removes a setting
    for change in changes:
        setting, _, key = change.setting.partition(".")
        if not change.left:
            request[setting] = configured[setting] if key else change.new
            if setting == "filter_subjects":
                request.pop("filter_subject", None)
    request = {setting: value for setting, value in request.items() if value is not None}
    action: Literal["update", "none"] = "update" if changes else "none"
    return Plan(kind=kind, name=name, action=action, changes=changes, refusal=refusal, request=request)


def _other_mode(source: SourceConfig, consumer: ConsumerState) -> str | None:
    """Return how to migrate from the consumer's `source.mode` to the configured one; None if it is the same."""
    ordered = is_ordered(consumer.config)
    if ordered == (source.mode == "ordered") or unusable(
        source.stream, source.consumer, consumer.config, "ordered" if ordered else "shared"
    ):
        return None
    wait = f" (it has {plural(consumer.unacked, 'unacknowledged message')})" if consumer.unacked else ""
    return (
        f"a consumer cannot be changed to source.mode {source.mode}: drain its captures{wait}, then set "
        "source.consumer to a new name, deliver_policy to by_start_sequence and start_sequence to its ack floor + 1, "
        f"which is now {consumer.ack_floor + 1}"
    )
