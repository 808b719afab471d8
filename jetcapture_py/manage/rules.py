"""What a server cannot change in place, and why; what a change would delete; what a server is too old for.

The server refuses most of these itself, but only when it is asked to make the change. Rules are those of nats-server
2.10 to 2.15 (`configUpdateCheck` of its stream.go, `checkNewConsumerConfig` of its consumer.go).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from jetcapture_py.jetstream.settings import Difference, normal
from jetcapture_py.text import plural

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
"""The version of the server that a setting came with; those without an entry are known to all since 2.10."""

_FIXED_STREAM = {
    "storage": "messages cannot be moved between file and memory",
    "allow_msg_counter": "a stream holds counters from its start, or never",
    "persist_mode": "it is decided when a stream is created",
    "first_seq": "it is decided when a stream is created",
}
_STAYS_ON = {
    "sealed": "a sealed stream cannot be opened again",
    "deny_delete": "once set, it cannot be taken back",
    "deny_purge": "once set, it cannot be taken back",
    "allow_msg_ttl": "once set, it cannot be taken back",
    "allow_msg_schedules": "once set, it cannot be taken back",
}
_FIXED_CONSUMER = {
    "deliver_policy": "a consumer starts only once",
    "opt_start_seq": "a consumer starts only once",
    "opt_start_time": "a consumer starts only once",
    "replay_policy": "it is decided when a consumer is created",
    "ack_policy": "it is decided when a consumer is created",
    "max_waiting": "it is decided when a consumer is created",
    "mem_storage": "it is decided when a consumer is created",
}
_DELETES = "so the server would delete {}; if that is meant, change it with `nats stream edit`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The server that is asked: its version, and whether it is part of a cluster."""

    version: str
    clustered: bool

    @property
    def number(self) -> tuple[int, ...]:
        """The version as numbers."""
        return tuple(int(part) for part in re.findall(r"\d+", self.version)[:2])

    def too_old_for(self, setting: str, value: Any) -> str | None:
        """Why a setting cannot be set, None when this server knows it."""
        since = SINCE.get(setting)
        if since is None or self.number >= since or normal(setting, value) is None:
            return None
        return f"nats-server {self.version} does not know it; {'.'.join(map(str, since))} does"

    def without_cluster(self, setting: str, value: Any) -> str | None:
        """Why there cannot be several replicas."""
        if setting == "num_replicas" and not self.clustered and (value or 0) > 1:
            return "this server is not part of a cluster"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMessages:
    """What a stream holds, from the server's answer; `most_per_subject` is the count of its largest subject."""

    messages: int
    size: int
    oldest: timedelta
    most_per_subject: int

    @classmethod
    def of(cls, answer: Mapping[str, Any], most_per_subject: int) -> StoredMessages:
        """Read the server's answer to STREAM.INFO."""
        state = answer["state"]
        now = datetime.fromisoformat(answer["ts"]) if "ts" in answer else None
        first = datetime.fromisoformat(state["first_ts"]) if state["messages"] else None
        age = now - first if now and first else timedelta()
        return cls(messages=state["messages"], size=state["bytes"], oldest=age, most_per_subject=most_per_subject)

    def deleted_by(self, change: Difference, settings: Mapping[str, Any]) -> str | None:
        """Why a change would delete messages, None when it would not. `settings` are the stream's after it."""
        limit, what = change.wanted or 0, None
        old = settings.get("discard", "old") == "old"
        if not self.messages:
            return None
        if change.name == "retention" and change.wanted == "interest":
            what = "messages that no consumer waits for"
        elif change.name == "max_age" and limit and self.oldest > timedelta(microseconds=limit / 1000):
            what = "messages that are older"
        elif change.name == "max_msgs_per_subject" and 0 < limit < self.most_per_subject:
            what = "the oldest messages of some subjects"
        elif old and change.name in ("max_msgs", "discard") and (surplus := self._surplus(settings)):
            what = plural(surplus, "message", grouped=True)
        elif old and change.name in ("max_bytes", "discard") and 0 < settings.get("max_bytes", -1) < self.size:
            what = "its oldest messages"
        return None if what is None else f"the stream holds more, {_DELETES.format(what)}"

    def _surplus(self, settings: Mapping[str, Any]) -> int:
        most = settings.get("max_msgs", -1)
        return max(self.messages - most, 0) if most > 0 else 0


def stream_refusal(change: Difference, actual: Mapping[str, Any], server: Server) -> str | None:
    """Why a stream's setting cannot be changed in place, None when it can."""
    name, new, old = change.name, change.wanted, change.actual
    if reason := server.too_old_for(name, new) or server.without_cluster(name, new):
        return reason
    if name in _FIXED_STREAM:
        return _FIXED_STREAM[name]
    if name in _STAYS_ON and old:
        return _STAYS_ON[name]
    if name == "retention" and "workqueue" in (new, old):
        return "a stream is a work queue from its start, or never"
    if name == "mirror" and normal(name, new) is not None:
        return "what a stream is a mirror of is decided when it is created"
    if name == "mirror" and server.number < (2, 12):
        return f"nats-server {server.version} cannot make a mirror an ordinary stream; 2.12 can"
    if name == "max_consumers" and server.number < (2, 12):
        return f"nats-server {server.version} decides it when a stream is created; 2.12 can change it"
    if name == "discard_new_per_subject" and new and actual.get("discard") != "new":
        return "it needs discard: new"
    window = actual.get("duplicate_window", 0)
    if name == "max_age" and new and new < window:
        return "it is shorter than duplicate_window; set that as well"
    return None


def consumer_refusal(change: Difference, actual: Mapping[str, Any], server: Server) -> str | None:
    """Why a consumer's setting cannot be changed in place, None when it can."""
    if reason := server.too_old_for(change.name, change.wanted) or server.without_cluster(change.name, change.wanted):
        return reason
    if change.name == "ack_wait" and actual.get("backoff"):
        return "the consumer's backoff replaces it; set source.consumer_config.backoff"
    return _FIXED_CONSUMER.get(change.name)
