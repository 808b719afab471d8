"""A configuration of many streams of an account: which streams it selects, and the configuration of each capture.

    source:
      streams: ["orders-*", "!orders-test"]   # in place of `stream`
      buckets: ["*"]                          # KV buckets and object stores
      consumer: archive

The other settings are those of every capture.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from jetcapture_py.config.buckets import PREFIXES, bucket_of
from jetcapture_py.config.model import MANY, PLACEHOLDER, Config, SourceConfig, is_of_many
from jetcapture_py.config.section import validated
from jetcapture_py.errors import ConfigError

Parse = Callable[[object, Mapping[str, str], str | None], Config]
"""Makes a capture's configuration of plain values and the file's text. Raises ConfigError."""

WORK_QUEUE = "its retention is workqueue, so an archive would take messages from other consumers"
"""Why a stream is left out unless it is named exactly."""


class AccountConfig:
    """The configuration of many captures. Raises ConfigError with one line per problem."""

    def __init__(self, data: Mapping[str, Any], env: Mapping[str, str], parse: Parse, text: str | None = None) -> None:
        self._data, self._env, self._parse, self._text = data, env, parse, text
        source = data["source"]
        if given := [name for name in ("stream", "bucket", "object_store") if source.get(name) is not None]:
            many = next(name for name in MANY if source.get(name) is not None)
            raise ConfigError(f"source.{many}: cannot be combined with {given[0]}")
        patterns = {name: source.get(name) for name in ("streams", "buckets", "max_streams")}
        checked = validated(SourceConfig, {"stream": "S", "consumer": "C", **patterns}, text=text, section="source")
        self.streams, self.buckets, self.max_streams = checked.streams, checked.buckets, checked.max_streams
        if all(pattern.startswith("!") for pattern in (*self.streams, *self.buckets)):
            raise ConfigError("source.streams: expected a name or a pattern without !")
        self._check_what_captures_share()
        self.sample = self.capture("STREAM" if self.streams else "KV_BUCKET")
        """The configuration of some capture; `nats`, `http` and `log` are the same for all."""

    @classmethod
    def of(cls, data: object, env: Mapping[str, str], parse: Parse, text: str | None = None) -> AccountConfig | None:
        """Return the configuration in the settings of a file; None if that is for a single capture."""
        return cls(data, env, parse, text) if isinstance(data, dict) and is_of_many(data) else None

    @property
    def divided(self) -> bool:
        """Whether every stream or key has its own `store.url`, so that no archive can list all streams."""
        url = str((self._data.get("store") or {}).get("url"))
        return PLACEHOLDER in url or "{key}" in url

    def selects(self, stream: str, *, takes: bool = False) -> bool:
        """Whether a stream is selected. With `takes`, as for a work queue, only a stream that is named exactly is."""
        if stream in self.streams:
            return not _fits_any(self.streams, stream, excluding=True)
        if takes:
            return False
        held = bucket_of(stream)
        name, patterns = (stream, self.streams) if held is None else (held[1], self.buckets)
        return _fits_any(patterns, name) and not _fits_any(patterns, name, excluding=True)

    def missing(self, streams: Collection[str]) -> list[str]:
        """Return streams that are selected by exact names and are not in `streams`."""
        buckets = {held[1] for held in map(bucket_of, streams) if held is not None}
        names = [name for name in self.streams if name not in streams]
        names += [f"{PREFIXES['bucket']}{name}" for name in self.buckets if name not in buckets]
        return [name for name in names if not {"*", "!"} & set(name) and self.selects(name)]

    def capture(self, stream: str) -> Config:
        """Return the configuration of a stream's capture. Raises ConfigError."""
        source = {name: value for name, value in self._data["source"].items() if name not in (*MANY, "max_streams")}
        if isinstance(consumer := source.get("consumer"), str):
            source["consumer"] = consumer.replace(PLACEHOLDER, stream)
        held = None if stream in self.streams else bucket_of(stream)
        setting, name = held or ("stream", stream)
        data = {**self._data, "source": {**source, setting: name}}
        if setting == "object_store":
            data.pop("decode", None)  # its messages are parts of files
        return self._parse(data, self._env, self._text)

    def _check_what_captures_share(self) -> None:
        """Raise ConfigError for settings that captures of one process cannot share."""
        limits, maintain = self._data.get("limits"), self._data.get("maintain")
        if isinstance(limits, dict) and limits.get("spool") is not None:
            raise ConfigError("limits.spool: cannot be combined with source.streams, whose captures share the memory")
        table = maintain.get("table") if isinstance(maintain, dict) else None
        names = table if isinstance(table, dict) else {}
        for name in ("name", "quarantine"):
            if isinstance(text := names.get(name), str) and PLACEHOLDER not in text:
                raise ConfigError(f"maintain.table.{name}: expected {PLACEHOLDER} in it: each stream has its own table")


def _fits_any(patterns: Iterable[str], name: str, *, excluding: bool = False) -> bool:
    """Whether a name fits one of the patterns, or with `excluding` one of those after `!`."""
    chosen = (pattern.removeprefix("!") for pattern in patterns if pattern.startswith("!") is excluding)
    return any(re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name) for pattern in chosen)
