"""Build the configuration of a restored stream."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jetcapture_py.archive.stream_config import StreamConfig
from jetcapture_py.config.model import SourceConfig, load_for_apply
from jetcapture_py.config.stream import api_values
from jetcapture_py.errors import ConfigError, JetcaptureError
from jetcapture_py.jetstream.consumer import consumer_config
from jetcapture_py.store.archive import ArchiveFiles

LIMITS = ("max_age", "max_msgs", "max_bytes", "max_msgs_per_subject", "max_msg_size")
_FEEDS = ("mirror", "sources", "republish", "subject_transform")
"""Settings that connect a stream to others by its subjects."""


def archived_config(files: ArchiveFiles, stream: str, created: str) -> StreamConfig | None:
    """Return the archived configuration of the incarnation `created`, or of the last one for ""; None without one.

    Raises JetcaptureError if one is damaged.
    """
    configs = [config for config in files.stream_configs(stream) if created in ("", config.created)]
    return configs[-1] if configs else None


def target_config(
    archived: StreamConfig | None, changes: Path | None, *, source: str, name: str, prefix: str, without_limits: bool
) -> dict[str, Any]:
    """Return the configuration of the new stream `name`: the archived one of stream `source`, with changes.

    Under another name or prefix, it is not connected to other streams. Archived sources are always dropped, because the
    server would copy all their messages again. Raises JetcaptureError.
    """
    if archived is None and changes is None:
        raise JetcaptureError(
            f"the archive does not have the configuration of stream {source}: name a file with --stream-config"
        )
    config: dict[str, Any] = {} if archived is None else dict(archived.config)
    unwanted = _FEEDS if name != source or prefix else ("sources",)
    config = {setting: value for setting, value in config.items() if setting not in unwanted}
    if changes is not None:
        section = load_for_apply(changes).stream
        if section is None:
            raise ConfigError(f"{changes}: stream: required, but not set")
        config |= api_values(section)
        starts = ("opt_start_seq", "opt_start_time")
        if again := [feed["name"] for feed in config.get("sources") or () if not any(map(feed.get, starts))]:
            raise ConfigError(
                f"{changes}: stream.sources: {', '.join(again)}: set opt_start_seq to the first sequence to copy, or "
                "the messages that were copied before are copied again"
            )
    config = {setting: value for setting, value in config.items() if value is not None} | {"name": name}
    if without_limits:
        config = {setting: value for setting, value in config.items() if setting not in LIMITS}
    if prefix:
        config["subjects"] = [f"{prefix}{subject}" for subject in config.get("subjects", [source])]
    return config


def without_sources(archived: StreamConfig | None, config: Mapping[str, Any]) -> str | None:
    """Describe the dropped sources in one line; None without any."""
    before = [] if archived is None else [str(feed["name"]) for feed in archived.config.get("sources") or ()]
    if not before or config.get("sources"):
        return None
    return (
        f"stream {config['name']} is created without its sources ({', '.join(before)}), of which it would copy all "
        "messages again: add each with opt_start_seq, the sequence after the one in the header Nats-Stream-Source of "
        "its last message"
    )


def consumer_settings(name: str, source: SourceConfig | None, prefix: str) -> dict[str, Any]:
    """Return the configuration of a consumer of the new stream, for the JetStream API.

    The consumer of the capture `source` is configured as by `apply`.
    """
    if source is None or name != source.consumer:
        return {"name": name, "durable_name": name, "ack_policy": "explicit", "deliver_policy": "all"}
    return consumer_config(
        source.model_copy(update={"filter_subjects": tuple(prefix + s for s in source.filter_subjects)})
    )


def beginning_at(config: Mapping[str, Any], first: int) -> Mapping[str, Any]:
    """Return the configuration of a stream whose first message has sequence `first`.

    The server starts a stream at `first_seq`, and would refuse earlier messages, such as those of an incarnation that
    the stream continues.
    """
    if int(config.get("first_seq") or 0) <= first:
        return config
    return {setting: value for setting, value in config.items() if setting != "first_seq"}


def limits_of(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the configured limits."""
    return {name: int(config[name]) for name in LIMITS if int(config.get(name) or 0) > 0}
