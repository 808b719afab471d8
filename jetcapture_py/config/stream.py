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
from jetcapture_py.config.section import Section
from jetcapture_py.config.units import DURATION_PATTERN, SIZE_PATTERN, parse_nanoseconds, parse_size, quoted

UNLIMITED = "unlimited"


def _nanoseconds(value: object) -> int:
    return 0 if value == UNLIMITED else parse_nanoseconds(value)


def _bytes(value: object) -> int:
    return -1 if value in (UNLIMITED, -1, "-1", 0, "0") else parse_size(value)


def _limit(value: object) -> object:
    if value in (UNLIMITED, -1, "-1", 0, "0") and not isinstance(value, bool):
        return -1
    if isinstance(value, bool) or (isinstance(value, int) and value < 0):
        raise ValueError(f"expected a whole number, or {UNLIMITED}, got {quoted(value)}")
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

    src: str | None = Field(default=None, description="Subjects to map; default: all.")
    dest: str = Field(description="Subject to map them to, such as `orders.{{wildcard(1)}}`.")


class ExternalSection(Section):
    """Access to a stream of another account or domain."""

    api: str = Field(description="Prefix of its JetStream API, such as `$JS.hub.API`.")
    deliver: str | None = Field(default=None, description="Prefix of the subjects it delivers to.")


class SourcingConsumerSection(Section):
    """The consumer that a mirror or source reads through."""

    name: str | None = Field(default=None, description="Its name.")
    deliver_subject: str | None = Field(default=None, description="The subject it delivers to.")


class StreamSourceSection(Section):
    """A stream to copy from."""

    name: str = Field(description="Stream to copy from.")
    opt_start_seq: types.Count | None = Field(default=None, description="First sequence to copy.")
    opt_start_time: types.ExactTime | None = Field(default=None, description="First time to copy, RFC 3339.")
    filter_subject: types.FilterSubject | None = Field(default=None, description="Subjects to copy.")
    subject_transforms: tuple[TransformSection, ...] | None = Field(
        default=None, description="Mappings of subjects, each with `src` and `dest`."
    )
    external: ExternalSection | None = Field(default=None, description="Set for another account or domain.")
    consumer: SourcingConsumerSection | None = Field(default=None, description="A consumer to read through.")


class PlacementSection(Section):
    """Which servers hold the stream."""

    cluster: str | None = Field(default=None, description="Name of the cluster.")
    tags: tuple[str, ...] | None = Field(default=None, description="Tags that the servers have.")
    preferred: str | None = Field(default=None, description="Server that is preferred as leader.")


class RepublishSection(Section):
    """Publish every stored message again."""

    src: str | None = Field(default=None, description="Subjects to publish again; default: all.")
    dest: str = Field(description="Subject to publish to.")
    headers_only: bool = Field(default=False, description="Without the payload.")


class ConsumerLimitsSection(Section):
    """Limits of the stream's consumers."""

    inactive_threshold: Nanoseconds | None = Field(default=None, description="Most a consumer may set.")
    max_ack_pending: Limit | None = Field(default=None, description="Most a consumer may set.")


class StreamSection(Section):
    """The stream as `jetcapture apply` configures it. Settings that are left out stay as they are on the server."""

    keeps_null = frozenset({"mirror", "placement", "republish", "subject_transform"})

    name: types.StreamName | None = Field(default=None, description="Name of the stream; default: `source.stream`.")
    description: str | None = Field(default=None, description="Free text.")
    subjects: tuple[types.FilterSubject, ...] | None = Field(default=None, description="Subjects to store.")
    retention: Literal["limits", "interest", "workqueue"] | None = Field(
        default=None,
        description="When to remove messages: at limits, or once all consumers (interest) or one (workqueue) acked.",
    )
    max_consumers: Limit | None = Field(default=None, description="Maximum number of consumers, or `unlimited`.")
    max_msgs: Limit | None = Field(default=None, description="Maximum number of messages, or `unlimited`.")
    max_bytes: Bytes | None = Field(default=None, description="Maximum size, or `unlimited`.")
    max_age: Nanoseconds | None = Field(default=None, description="Maximum age of a message, or `unlimited`.")
    max_msgs_per_subject: Limit | None = Field(default=None, description="Maximum per subject, or `unlimited`.")
    max_msg_size: Bytes | None = Field(default=None, description="Maximum size of a message, or `unlimited`.")
    discard: Literal["old", "new"] | None = Field(
        default=None, description="What to discard at a limit: old messages or new ones."
    )
    discard_new_per_subject: bool | None = Field(
        default=None, description="With `discard: new`, refuse messages of a subject at its maximum."
    )
    storage: Literal["file", "memory"] | None = Field(default=None, description="Where messages are kept.")
    num_replicas: types.Count | None = Field(default=None, description="Servers that hold the stream.")
    no_ack: bool | None = Field(default=None, description="Do not acknowledge publishes.")
    duplicate_window: Nanoseconds | None = Field(
        default=None, description="How long message ids are remembered to drop duplicates."
    )
    placement: PlacementSection | None = Field(default=None, description="Which servers hold it; `null`: any.")
    mirror: StreamSourceSection | None = Field(
        default=None, description="Stream to mirror; `null` turns a mirror into an ordinary stream."
    )
    sources: tuple[StreamSourceSection, ...] | None = Field(
        default=None, description="Streams to copy from, each with the settings of `stream.mirror`."
    )
    compression: Literal["none", "s2"] | None = Field(default=None, description="Compression of the stored messages.")
    first_seq: types.Count | None = Field(default=None, description="Sequence of the first message of a new stream.")
    subject_transform: TransformSection | None = Field(
        default=None, description="Map subjects before storing; `null`: no mapping."
    )
    republish: RepublishSection | None = Field(default=None, description="Publish stored messages; `null`: no.")
    sealed: bool | None = Field(default=None, description="Refuse new messages and deletions, permanently.")
    deny_delete: bool | None = Field(default=None, description="Refuse to delete messages, permanently.")
    deny_purge: bool | None = Field(default=None, description="Refuse to purge the stream, permanently.")
    allow_rollup_hdrs: bool | None = Field(
        default=None, description="Allow a message to replace all earlier ones (rollup)."
    )
    allow_direct: bool | None = Field(default=None, description="Allow every replica to answer requests for messages.")
    mirror_direct: bool | None = Field(default=None, description="Allow a mirror to answer for its origin.")
    allow_msg_ttl: bool | None = Field(default=None, description="Allow messages with their own TTL (2.11).")
    subject_delete_marker_ttl: Nanoseconds | None = Field(
        default=None, description="How long to keep markers of removed messages (2.11)."
    )
    allow_msg_counter: bool | None = Field(default=None, description="The stream holds counters (2.12).")
    allow_atomic: bool | None = Field(default=None, description="Allow atomic batches (2.12).")
    allow_msg_schedules: bool | None = Field(default=None, description="Allow scheduled messages (2.12).")
    persist_mode: Literal["default", "async"] | None = Field(
        default=None, description="`async` acknowledges before messages are written (2.12)."
    )
    allow_batched: bool | None = Field(default=None, description="Allow fast batches (2.14).")
    consumer_limits: ConsumerLimitsSection | None = Field(default=None, description="Limits of its consumers.")
    metadata: _Metadata | None = Field(default=None, description="Names and values, as a whole.")


class ConsumerSection(Section):
    """Further settings of the consumer. Settings that are left out stay as they are on the server."""

    description: str | None = Field(default=None, description="Free text.")
    max_deliver: Limit | None = Field(
        default=None,
        description="Maximum deliveries of a message; afterwards the archive misses it. Default: unlimited.",
    )
    backoff: tuple[Nanoseconds, ...] | None = Field(
        default=None, description="Delays before the second, third, … delivery; the first replaces `source.ack_wait`."
    )
    sample_freq: Annotated[str, BeforeValidator(_text_of_percent)] | None = Field(
        default=None, description="Percentage of acknowledgements to publish as samples."
    )
    max_waiting: types.Count | None = Field(default=None, description="Maximum number of open pulls.")
    max_batch: types.Count | None = Field(default=None, description="Maximum messages that a pull may ask for.")
    max_expires: Nanoseconds | None = Field(default=None, description="Maximum time that a pull may stay open.")
    max_bytes: Bytes | None = Field(default=None, description="Maximum bytes that a pull may ask for.")
    inactive_threshold: Nanoseconds | None = Field(
        default=None, description="Time without pulls after which the server deletes the consumer; default: never."
    )
    num_replicas: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="Servers that hold its state; 0: as for the stream."
    )
    mem_storage: bool | None = Field(default=None, description="Keep its state in memory only.")
    metadata: _Metadata | None = Field(default=None, description="Names and values, as a whole.")
    pause_until: types.ExactTime | None = Field(default=None, description="Deliver nothing until then, RFC 3339.")


def api_values(section: Section) -> dict[str, Any]:
    """Return the settings in the file with the values of the JetStream API; None for `null`."""
    return {
        name: _plain(getattr(section, name)) for name in type(section).model_fields if name in section.model_fields_set
    }


def _plain(value: object) -> Any:
    if isinstance(value, Section):
        values = api_values(value)
        return {name: each for name, each in values.items() if each is not None}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return dict(value) if isinstance(value, Mapping) else value
