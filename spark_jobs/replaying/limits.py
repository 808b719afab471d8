"""Warn about limits of a target stream that would drop or refuse replayed messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jetcapture_py.config.units import format_duration

_NANOSECOND = 1_000_000_000
MESSAGE_OVERHEAD = 40
"""Approximate bytes that a server adds to a stored message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """Estimated load of a replay on one stream. `size`: total bytes; `largest`: bytes of the largest payload;
    `of_a_subject`: maximum messages on one subject; `seconds`: duration."""

    messages: int = 0
    size: int = 0
    largest: int = 0
    of_a_subject: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """A stream's limits, None for unlimited, and its current content; `age` in seconds. `refuses`: at a limit it
    refuses new messages instead of removing old ones. `keeps_nothing`: interest retention without a consumer."""

    messages: int | None = None
    size: int | None = None
    message_size: int | None = None
    of_a_subject: int | None = None
    age: float | None = None
    refuses: bool = False
    keeps_nothing: bool = False
    held_messages: int = 0
    held_size: int = 0

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Limits:
        """Parse the server's STREAM.INFO answer."""
        config, state = info["config"], info["state"]

        def limit(name: str) -> int | None:
            value = int(config.get(name, 0))
            return value if value > 0 else None

        age = limit("max_age")
        return cls(
            messages=limit("max_msgs"),
            size=limit("max_bytes"),
            message_size=limit("max_msg_size"),
            of_a_subject=limit("max_msgs_per_subject"),
            age=None if age is None else age / _NANOSECOND,
            refuses=config.get("discard") == "new",
            keeps_nothing=config.get("retention") == "interest" and not state.get("consumer_count"),
            held_messages=state.get("messages", 0),
            held_size=state.get("bytes", 0),
        )

    @property
    def any(self) -> bool:
        """Whether any limit is set."""
        limits = self.messages, self.size, self.message_size, self.of_a_subject, self.age
        return self.keeps_nothing or any(limit is not None for limit in limits)

    def warnings(self, incoming: Incoming) -> Iterator[str]:
        """Yield one warning per exceeded limit, to be appended to the stream's name."""
        if not incoming.messages:
            return
        if self.keeps_nothing:
            yield "would store nothing: it has interest retention and no consumer"
        if self.message_size is not None and incoming.largest > self.message_size:
            yield (
                f"accepts messages of at most {self.message_size:,} bytes (max_msg_size): "
                f"it would refuse some of up to {incoming.largest:,} bytes"
            )
        published = f"the {incoming.messages:,} published"
        if self.messages is not None and self._exceeds(incoming.messages, self.held_messages, self.messages):
            yield self._full("max_msgs", f"{self.messages:,} messages", f"{self.held_messages:,}", published)
        if self.size is not None and self._exceeds(incoming.size, self.held_size, self.size):
            published += f" with about {incoming.size:,} bytes"
            yield self._full("max_bytes", f"{self.size:,} bytes", f"{self.held_size:,}", published)
        if self.of_a_subject is not None and incoming.of_a_subject > self.of_a_subject:
            yield (
                f"keeps {self.of_a_subject:,} messages per subject (max_msgs_per_subject): "
                f"up to {incoming.of_a_subject:,} are published to one subject"
            )
        if self.age is not None and incoming.seconds > self.age:
            takes = format_duration(round(incoming.seconds))
            yield f"keeps messages for {format_duration(self.age)} (max_age), but the replay takes about {takes}"

    def _exceeds(self, incoming: int, held: int, limit: int) -> bool:
        """Whether new messages would be lost: a stream that removes old ones only counts the new messages."""
        return incoming + (held if self.refuses else 0) > limit

    def _full(self, name: str, limit: str, held: str, published: str) -> str:
        if self.refuses:
            return f"keeps {limit} ({name}, discard new) and holds {held}: it would refuse some of {published}"
        return f"keeps {limit} ({name}): it would discard the oldest of {published}"
