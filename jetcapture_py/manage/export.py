"""The `export` command: print a stream and a consumer as a configuration; applying it changes nothing."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from jetcapture_py.config import yaml_text
from jetcapture_py.config.buckets import bucket_of
from jetcapture_py.config.messages import problems
from jetcapture_py.config.model import TOO_MANY_UNACKED, Managed, NatsConfig
from jetcapture_py.config.stream import ConsumerSection, StreamSection
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.admin import filters_of, unusable
from jetcapture_py.jetstream.connection import CONSUMER_NOT_FOUND, STREAM_NOT_FOUND
from jetcapture_py.jetstream.read_session import ReadSession
from jetcapture_py.jetstream.settings import normal
from jetcapture_py.manage.plan import info_or_none
from jetcapture_py.manage.show import human

TIMEOUT = 10.0
_ALWAYS = frozenset({"allow_direct"})
"""Settings whose default depends on other settings."""


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
        answer = await info_or_none(session, f"STREAM.INFO.{stream}", STREAM_NOT_FOUND)
        if answer is None:
            raise SourceError(f"stream {stream} does not exist")
        sections: dict[str, Any] = {"nats": _nats(nats), "stream": stream_section(answer["config"])}
        if consumer is not None:
            described = await info_or_none(session, f"CONSUMER.INFO.{stream}.{consumer}", CONSUMER_NOT_FOUND)
            if described is None:
                raise SourceError(f"consumer {consumer} does not exist on stream {stream}")
            sections["source"] = source_section(stream, consumer, described["config"])
    try:
        Managed.model_validate({**sections, "nats": {}})
    except ValidationError as error:
        reasons = "; ".join(problems(error, Managed))
    else:
        return sections
    raise SourceError(f"stream {stream} has settings that a configuration does not support: {reasons}")


def _nats(nats: NatsConfig) -> dict[str, Any]:
    """Return the servers or the context, without credentials."""
    return {"servers": list(nats.servers)} if nats.context is None else {"context": nats.context}


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
    if problem := unusable(stream, consumer, config):
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
    if not config.get("backoff"):
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
