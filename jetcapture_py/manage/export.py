"""Settings of the JetStream API as in a configuration file: of the `export` command, and of the changes of `apply`.

Applying what `export` prints changes nothing.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from typing import Any

from jetcapture_py.config import yaml_text
from jetcapture_py.config.buckets import bucket_of
from jetcapture_py.config.model import TOO_MANY_UNACKED, NatsConfig, parse_for_apply
from jetcapture_py.config.stream import UNLIMITED, ConsumerSection, StreamSection
from jetcapture_py.config.units import format_nanoseconds, format_size
from jetcapture_py.errors import ConfigError, SourceError
from jetcapture_py.jetstream.consumer import filters_of, normal, unusable
from jetcapture_py.jetstream.ordered_consumer import is_ordered
from jetcapture_py.jetstream.read_session import ReadSession
from jetcapture_py.manage.plan import info_or_none

TIMEOUT = 10.0
_ALWAYS = frozenset({"allow_direct"})
"""Settings whose default depends on other settings."""

DURATIONS = frozenset(
    {
        "ack_wait",
        "duplicate_window",
        "inactive_threshold",
        "max_age",
        "max_expires",
        "subject_delete_marker_ttl",
    }
)
SIZES = frozenset({"max_bytes", "max_msg_size"})
LIMITS = frozenset({"max_ack_pending", "max_consumers", "max_deliver", "max_msgs", "max_msgs_per_subject"})
_WORDS = frozenset(
    {"ack_policy", "compression", "deliver_policy", "discard", "persist_mode", "replay_policy", "retention", "storage"}
)


def run(nats: NatsConfig, stream: str, consumer: str | None) -> int:
    """Print the configuration as YAML; return the exit code. Raises SourceError."""
    sections = asyncio.run(export(nats, stream, consumer))
    sys.stdout.write(yaml_text.write(sections))
    if consumer is not None:
        sys.stdout.write("# store: {url: …}   with a store, this is the configuration of a capture\n")
    return 0


async def export(nats: NatsConfig, stream: str, consumer: str | None) -> dict[str, Any]:
    """Return the sections of the configuration. Raises SourceError."""
    async with ReadSession(nats, f"jetcapture export {stream}", timeout=TIMEOUT) as session:
        answer = await info_or_none(session, f"STREAM.INFO.{stream}")
        if answer is None:
            raise SourceError(f"stream {stream} does not exist")
        servers = {"servers": list(nats.servers)} if nats.context is None else {"context": nats.context}
        sections: dict[str, Any] = {"nats": servers, "stream": stream_section(answer["config"])}
        if consumer is not None:
            described = await info_or_none(session, f"CONSUMER.INFO.{stream}.{consumer}")
            if described is None:
                raise SourceError(f"consumer {consumer} does not exist on stream {stream}")
            sections["source"] = source_section(stream, consumer, described["config"])
    try:
        parse_for_apply({**sections, "nats": {}})
    except ConfigError as error:
        reasons = "; ".join(error.problems)
        raise SourceError(f"stream {stream} has settings that a configuration does not support: {reasons}") from None
    return sections


def stream_section(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `stream` section for a configuration of the API, without settings at their default."""
    section: dict[str, Any] = {"name": config["name"]}
    for setting in StreamSection.model_fields:
        value = config.get(setting)
        if setting == "metadata":
            value = normal(setting, value or {})
        if setting in config and setting != "name" and (setting in _ALWAYS or normal(setting, value) is not None):
            section[setting] = human(setting, value)
    for setting in ("retention", "storage", "discard"):
        section.setdefault(setting, config.get(setting))
    return section


def source_section(stream: str, consumer: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `source` section. Raises SourceError for a consumer that cannot be captured from."""
    where = f"consumer {consumer} of stream {stream}"
    mode = "ordered" if is_ordered(config) else "shared"
    if problem := unusable(stream, consumer, config, mode):
        raise SourceError(problem)
    unacked = config.get("max_ack_pending", -1)
    if unacked <= 0:
        raise SourceError(f"{where} has no max_ack_pending; a limit is required")
    setting, name = bucket_of(stream) or ("stream", stream)
    section: dict[str, Any] = {setting: name, "consumer": consumer}
    if filters := list(filters_of(config)):
        section["filter_subjects"] = filters
    section["deliver_policy"] = config["deliver_policy"]
    for setting, ours in (("opt_start_seq", "start_sequence"), ("opt_start_time", "start_time")):
        if config.get(setting):
            section[ours] = config[setting]
    section["replay_policy"] = config.get("replay_policy", "instant")
    if mode == "ordered":
        section |= {"mode": mode, "takeover": human("priority_timeout", config["priority_timeout"])}
    elif not config.get("backoff"):
        section["ack_wait"] = human("ack_wait", config["ack_wait"])
    section["max_ack_pending"] = unacked
    if unacked > TOO_MANY_UNACKED:
        section["allow_many_unacked"] = True
    rest = {}
    for setting in ConsumerSection.model_fields:
        value = normal(setting, config[setting]) if setting == "metadata" and setting in config else config.get(setting)
        if normal(setting, value) is not None:
            rest[setting] = human(setting, value)
    return {**section, "consumer_config": rest} if rest else section


# ------------------------------------------------------------------ values as text


def human(name: str, value: Any) -> Any:
    """Convert a value of the API to one of a configuration file."""
    if isinstance(value, dict):
        if name == "metadata":
            return value
        return {key: human(key, part) for key, part in value.items() if key == "name" or normal(key, part)}
    if name == "backoff":
        return [format_nanoseconds(item) for item in value]
    if isinstance(value, list | tuple):
        return [human("", item) for item in value]
    if name in DURATIONS and isinstance(value, int):
        return UNLIMITED if value <= 0 and name == "max_age" else format_nanoseconds(max(value, 0))
    if name in SIZES and isinstance(value, int):
        return format_size(value) if value > 0 else UNLIMITED
    return UNLIMITED if name in LIMITS and value in (-1, 0) else value


def shown(name: str, value: Any) -> str:
    """Return a value of the API as text."""
    text = human(name, value or 0) if name in LIMITS | SIZES | DURATIONS else human(name, value)
    bare = isinstance(text, str) and name in LIMITS | SIZES | DURATIONS | _WORDS
    return str(text) if bare else json.dumps(text, ensure_ascii=False)
