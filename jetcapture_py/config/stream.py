"""The sections `stream` and `source.consumer_config`, which `jetcapture apply` manages.

Names are those of the JetStream API (StreamConfig and ConsumerConfig of nats-server 2.15). Values are in the API's
units: durations in nanoseconds, sizes in bytes, -1 for no limit. Only settings in the file are managed; all others stay
as they are on the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from jetcapture_py.config import values as types
from jetcapture_py.config.section import Section, setting
from jetcapture_py.config.units import DURATION_PATTERN, SIZE_PATTERN, parse_nanoseconds, parse_size

UNLIMITED = "unlimited"


def _nanoseconds(value: object) -> int:
    return 0 if value == UNLIMITED else parse_nanoseconds(value)


def _bytes(value: object) -> int:
    return -1 if value in (UNLIMITED, -1, "-1", 0, "0") else parse_size(value)


def _limit(value: object) -> object:
    if value in (UNLIMITED, -1, "-1", 0, "0") and not isinstance(value, bool):
        return -1
    if isinstance(value, bool) or (isinstance(value, int) and value < 0):
        raise ValueError(f"expected a whole number, or {UNLIMITED}")
    return value


def _text_of_percent(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Nanoseconds = Annotated[
    int,
    BeforeValidator(_nanoseconds),
    WithJsonSchema({"type": ["string", "number"], "pattern": f"^{UNLIMITED}$|{DURATION_PATTERN}", "minimum": 0}),
]
"""A duration in nanoseconds; 0 for `unlimited`."""
Bytes = Annotated[
    int,
    BeforeValidator(_bytes),
    WithJsonSchema({"type": ["string", "integer"], "pattern": f"^{UNLIMITED}$|{SIZE_PATTERN}", "minimum": -1}),
]
"""A size in bytes; -1 for `unlimited`."""
Limit = Annotated[
    int,
    BeforeValidator(_limit),
    WithJsonSchema({"type": ["string", "integer"], "pattern": f"^(?:{UNLIMITED}|[0-9]+)$", "minimum": -1}),
]
"""A number; -1 for `unlimited`."""
_Metadata = dict[str, str]


class TransformSection(Section):
    """A mapping of subjects."""

    src: str | None = setting("Subjects to map; default: all.")
    dest: str = Field(description="Subject to map them to, such as `orders.{{wildcard(1)}}`.")


class ExternalSection(Section):
    """Access to a stream of another account or domain."""

    api: str = Field(description="Prefix of its JetStream API, such as `$JS.hub.API`.")
    deliver: str | None = setting("Prefix of the subjects it delivers to.")


class SourcingConsumerSection(Section):
    """The consumer that a mirror or source reads through."""

    name: str | None = setting("Its name.")
    deliver_subject: str | None = setting("The subject it delivers to.")


class StreamSourceSection(Section):
    """A stream to copy from."""

    name: str = Field(description="Stream to copy from.")
    opt_start_seq: types.Count | None = setting("First sequence to copy.")
    opt_start_time: types.ExactTime | None = setting("First time to copy, RFC 3339.")
    filter_subject: types.FilterSubject | None = setting("Subjects to copy.")
    subject_transforms: tuple[TransformSection, ...] | None = setting(
        "Mappings of subjects, each with `src` and `dest`."
    )
    external: ExternalSection | None = setting("Set for another account or domain.")
    consumer: SourcingConsumerSection | None = setting("A consumer to read through.")


class PlacementSection(Section):
    """Which servers hold the stream."""

    cluster: str | None = setting("Name of the cluster.")
    tags: tuple[str, ...] | None = setting("Tags that the servers have.")
    preferred: str | None = setting("Server that is preferred as leader.")


class RepublishSection(Section):
    """Publish every stored message again."""

    src: str | None = setting("Subjects to publish again; default: all.")
    dest: str = Field(description="Subject to publish to.")
    headers_only: bool = setting("Without the payload.", default=False)


class ConsumerLimitsSection(Section):
    """Limits of the stream's consumers."""

    inactive_threshold: Nanoseconds | None = setting("Maximum of a consumer, and its value if it sets none.")
    max_ack_pending: Limit | None = setting("Upper limit for the consumers' `max_ack_pending`.")


class StreamSection(Section):
    """The stream as `jetcapture apply` configures it. Settings that are left out stay as they are on the server."""

    keeps_null = frozenset({"mirror", "placement", "republish", "subject_transform"})

    name: types.StreamName | None = setting("Name of the stream; default: `source.stream`.")
    description: str | None = setting("Free text.")
    subjects: tuple[types.FilterSubject, ...] | None = setting("Subjects to store.")
    retention: Literal["limits", "interest", "workqueue"] | None = setting(
        "When to remove messages: at limits, or once all consumers (interest) or one (workqueue) acked."
    )
    max_consumers: Limit | None = setting("Maximum number of consumers, or `unlimited`.")
    max_msgs: Limit | None = setting("Maximum number of messages, or `unlimited`.")
    max_bytes: Bytes | None = setting("Maximum size, or `unlimited`.")
    max_age: Nanoseconds | None = setting("Maximum age of a message, or `unlimited`.")
    max_msgs_per_subject: Limit | None = setting("Maximum per subject, or `unlimited`.")
    max_msg_size: Bytes | None = setting("Maximum size of a message, or `unlimited`.")
    discard: Literal["old", "new"] | None = setting("What to discard at a limit: old messages or new ones.")
    discard_new_per_subject: bool | None = setting("With `discard: new`, refuse messages of a subject at its maximum.")
    storage: Literal["file", "memory"] | None = setting("Where messages are kept.")
    num_replicas: types.Count | None = setting("Servers that hold the stream.")
    no_ack: bool | None = setting("Do not acknowledge publishes.")
    duplicate_window: Nanoseconds | None = setting("How long message ids are remembered to drop duplicates.")
    placement: PlacementSection | None = setting("Which servers hold it; `null`: any.")
    mirror: StreamSourceSection | None = setting("Stream to mirror; `null` turns a mirror into an ordinary stream.")
    sources: tuple[StreamSourceSection, ...] | None = setting(
        "Streams to copy from, each with the settings of `stream.mirror`."
    )
    compression: Literal["none", "s2"] | None = setting("Compression of the stored messages.")
    first_seq: types.Count | None = setting("Sequence of the first message of a new stream.")
    subject_transform: TransformSection | None = setting("Map subjects before storing; `null`: no mapping.")
    republish: RepublishSection | None = setting("Publish stored messages; `null`: no.")
    sealed: bool | None = setting("Refuse new messages and deletions, permanently.")
    deny_delete: bool | None = setting("Refuse to delete messages, permanently.")
    deny_purge: bool | None = setting("Refuse to purge the stream, permanently.")
    allow_rollup_hdrs: bool | None = setting("Allow a message to replace all earlier ones (rollup).")
    allow_direct: bool | None = setting("Allow every replica to answer requests for messages.")
    mirror_direct: bool | None = setting("Allow a mirror to answer for its origin.")
    allow_msg_ttl: bool | None = setting("Allow messages with their own TTL (2.11).")
    subject_delete_marker_ttl: Nanoseconds | None = setting("How long to keep markers of removed messages (2.11).")
    allow_msg_counter: bool | None = setting("The stream holds counters (2.12).")
    allow_atomic: bool | None = setting("Allow atomic batches (2.12).")
    allow_msg_schedules: bool | None = setting("Allow scheduled messages (2.12).")
    persist_mode: Literal["default", "async"] | None = setting(
        "`async` acknowledges before messages are written (2.12)."
    )
    allow_batched: bool | None = setting("Allow fast batches (2.14).")
    consumer_limits: ConsumerLimitsSection | None = setting("Limits of its consumers.")
    metadata: _Metadata | None = setting("Names and values, as a whole.")


class ConsumerSection(Section):
    """Further settings of the consumer. Settings that are left out stay as they are on the server."""

    description: str | None = setting("Free text.")
    max_deliver: Limit | None = setting(
        "Maximum deliveries of a message; afterwards the archive misses it. Default: unlimited."
    )
    backoff: tuple[Nanoseconds, ...] | None = setting(
        "Delays before the second, third, … delivery; the first replaces `source.ack_wait`."
    )
    sample_freq: Annotated[str, BeforeValidator(_text_of_percent)] | None = setting(
        "Percentage of acknowledgements to publish as samples."
    )
    max_waiting: types.Count | None = setting("Maximum number of open pulls.")
    max_batch: types.Count | None = setting("Maximum messages that a pull may ask for.")
    max_expires: Nanoseconds | None = setting("Maximum time that a pull may stay open.")
    max_bytes: Bytes | None = setting("Maximum bytes that a pull may ask for.")
    inactive_threshold: Nanoseconds | None = setting(
        "Time without pulls after which the server deletes the consumer; default: that of the stream, or never."
    )
    num_replicas: Annotated[int, Field(ge=0)] | None = setting("Servers that hold its state; 0: as for the stream.")
    mem_storage: bool | None = setting("Keep its state in memory only.")
    metadata: _Metadata | None = setting("Names and values, as a whole.")
    pause_until: types.ExactTime | None = setting("Deliver nothing until then, RFC 3339.")


def origins(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the mirror and the sources in a stream's API configuration."""
    return [origin for origin in (config.get("mirror"), *(config.get("sources") or ())) if origin]


def api_values(section: Section) -> dict[str, Any]:
    """Return the settings in the file with the values of the JetStream API; None for `null`."""
    return section.model_dump(mode="json", exclude_unset=True)
