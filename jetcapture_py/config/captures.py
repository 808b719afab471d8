"""The captures of a command: its files, the streams that they select, and the rules for running together.

A file is for one capture, or for many streams of an account:

    source:
      streams: ["orders-*", "!orders-test"]   # in place of `stream`
      buckets: ["*"]                          # KV buckets and object stores
      consumer: archive

The other settings then apply to every capture. A capture is named after its file, and also after its stream if the file
is for many. Captures of one process have different names, do not do the same work twice, and agree on the process's
HTTP address and log.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from jetcapture_py.config import yaml_text
from jetcapture_py.config.buckets import PREFIXES, bucket_of
from jetcapture_py.config.model import (
    MANY,
    PLACEHOLDER,
    Config,
    HttpConfig,
    LogConfig,
    SourceConfig,
    is_of_many,
    load,
    parse,
    read_text,
)
from jetcapture_py.config.section import validated
from jetcapture_py.config.subjects import overlaps
from jetcapture_py.errors import ConfigError
from jetcapture_py.text import plural

WORK_QUEUE = "its retention is workqueue, so an archive would take messages from other consumers"
"""Why a stream is left out unless it is named exactly."""
CAPTURES_AT_ONCE = 8
"""Maximum captures examined at the same time by a command."""
RESERVED = ("metrics", "livez", "readyz", "snapshot", "status.json")
"""Paths of the process's own HTTP endpoints."""
_OFF = "null"
_LOGIN = {"user", "token", "token_file", "creds", "nkey_seed", "nkey_seed_file", "user_jwt", "user_seed"}
"""Settings of `nats` that may select an account."""
_PORTS = {"ws": 80, "wss": 443}
_ONE = {
    "http.listen": "one process has one address: leave it out, or use --http",
    "log.format": "one process has one log: leave it out",
    "log.level": "one process has one log: leave it out",
}
_EVERY = "*"
"""Placeholder for the stream in the id of a problem with a file's selection."""
_MAX_NAMED = 10
"""Maximum streams named by a problem."""

Parse = Callable[[object, Mapping[str, str], str | None], Config]
"""Builds a capture's configuration from plain values and the file's text. Raises ConfigError."""


# ---------------------------------------------------------------------- a file for many


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
        """A sample capture's configuration; `nats`, `http` and `log` are the same for all."""

    @classmethod
    def of(cls, data: object, env: Mapping[str, str], parse: Parse, text: str | None = None) -> AccountConfig | None:
        """Return the configuration for many captures in a file's settings; None if the file is for a single capture."""
        return cls(data, env, parse, text) if isinstance(data, dict) and is_of_many(data) else None

    @property
    def divided(self) -> bool:
        """Whether every stream or key has its own `store.url`, so that no archive can list all streams."""
        url = str((self._data.get("store") or {}).get("url"))
        return PLACEHOLDER in url or "{key}" in url

    def selects(self, stream: str, *, takes: bool = False) -> bool:
        """Whether a stream is selected. With `takes`, as for a work queue, the name must match exactly."""
        if stream in self.streams:
            return not _fits_any(self.streams, stream, excluding=True)
        if takes:
            return False
        held = bucket_of(stream)
        name, patterns = (stream, self.streams) if held is None else (held[1], self.buckets)
        return _fits_any(patterns, name) and not _fits_any(patterns, name, excluding=True)

    def missing(self, streams: Collection[str]) -> list[str]:
        """Return streams that are selected by exact name but not in `streams`."""
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
        latest = names.get("latest")
        names = {**names, "latest.name": latest.get("name") if isinstance(latest, dict) else None}
        for name in ("name", "quarantine", "latest.name"):
            if isinstance(text := names.get(name), str) and PLACEHOLDER not in text:
                raise ConfigError(f"maintain.table.{name}: expected {PLACEHOLDER} in it: each stream has its own table")


def _fits_any(patterns: Iterable[str], name: str, *, excluding: bool = False) -> bool:
    """Whether a name fits one of the patterns, or with `excluding` one of those after `!`."""
    chosen = (pattern.removeprefix("!") for pattern in patterns if pattern.startswith("!") is excluding)
    return any(re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name) for pattern in chosen)


# ---------------------------------------------------------------------- all files of a command


class CaptureId(NamedTuple):
    """A capture: its file and, if that is for many, its stream."""

    path: Path
    stream: str = ""

    @property
    def name(self) -> str:
        """The capture's name in logs, metrics and addresses."""
        return f"{self.path.stem}.{self.stream}" if self.stream else self.path.stem

    def __str__(self) -> str:
        return f"{self.path}: stream {self.stream}" if self.stream else str(self.path)


@dataclass(frozen=True, slots=True)
class SelectedStreams:
    """The streams currently selected by a configuration for many captures."""

    names: Sequence[str] = ()
    """Streams to capture, sorted."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Streams that are left out, with the reason."""


Find = Callable[[AccountConfig], SelectedStreams]
"""Finds streams. Raises JetcaptureError."""


@dataclass(slots=True, kw_only=True)
class Captures:
    """The captures of a command's files, and their process-wide settings."""

    configs: dict[CaptureId, Config] = field(default_factory=dict)
    """Configuration of each capture."""
    problems: dict[CaptureId, tuple[str, ...]] = field(default_factory=dict)
    """Problems of selected streams, one line each."""
    left_out: dict[CaptureId, str] = field(default_factory=dict)
    """Reasons why selected streams are left out."""
    listen: str | None = None
    """The address of the HTTP server; None without one."""
    listen_required: bool = False
    """Whether the address was configured, so that a port in use is an error."""
    log: LogConfig = field(default_factory=LogConfig)
    """First format and level set in a file."""


class CaptureFiles:
    """The current configuration files, and directories of them. Captures are chosen by `streams`, or else by `find`.

    `listen` overrides their `http`. With `together`, captures must be able to run in one process. Raises ConfigError.
    """

    def __init__(
        self,
        arguments: Sequence[Path],
        listen: str | None = None,
        env: Mapping[str, str] = os.environ,
        *,
        find: Find | None = None,
        streams: Sequence[str] = (),
        together: bool = True,
        parse: Parse = parse,
    ) -> None:
        if listen is not None:
            section, rename = {"listen": listen}, lambda line: line.replace("listen:", "--http:", 1)
            listen = validated(HttpConfig, section, rename=rename).listen
        self._arguments, self._listen, self._env, self._parse = arguments, listen, env, parse
        self._find, self._streams, self._together = find, streams, together
        self.configs: Mapping[CaptureId, Config] = {}
        """The configurations that were selected last."""
        self._read()

    def _read(self) -> None:
        one = len(self._arguments) == 1 and not self._arguments[0].is_dir()
        problems: list[str] = []
        paths: dict[Path, None] = {}
        self._files: dict[Path, Config | AccountConfig] = {}
        for argument in self._arguments:
            try:
                paths |= dict.fromkeys(yaml_text.expand(argument))
            except ConfigError as error:
                problems += error.problems
        for path in paths:
            try:
                self._files[path] = self._load(path, "" if one else f"{path}: ")
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(*problems)
        self.of_many = any(isinstance(file, AccountConfig) for file in self._files.values())
        """Whether any file is for many streams, which may change at any time."""
        self.single = one and not self.of_many
        """Whether there is only one capture, so that output omits its name."""

    def again(self) -> CaptureFiles:
        """Re-read the files. Raises ConfigError."""
        files = copy.copy(self)
        files._read()
        if files.single is not self.single:
            raise ConfigError("source.streams: restart the process to change between one stream and many")
        return files

    def shows_one(self, captures: Captures) -> bool:
        """Whether a command shows its only capture in full: the only one of its file, or the chosen one."""
        return len(captures.configs) == 1 and not captures.problems and (self.single or len(self._streams) == 1)

    def select(self, running: Collection[CaptureId] = ()) -> Captures:
        """Return the captures to run. A `running` capture stays while its stream is selected.

        Raises ConfigError if captures conflict or a running one's configuration has become wrong, and JetcaptureError
        if streams cannot be found.
        """
        captures = Captures()
        for path, file in self._files.items():
            if isinstance(file, AccountConfig):
                self._add_streams(captures, path, file, running)
            elif not self._streams or file.source.stream in self._streams:
                captures.configs[CaptureId(path)] = file
        streams = {config.source.stream for config in captures.configs.values()}
        streams |= {capture.stream for capture in captures.problems}
        if missing := [stream for stream in self._streams if stream not in streams]:
            raise ConfigError(*(f"--stream: the configuration has no capture of stream {name}" for name in missing))
        if self._together:
            self._leave_out_conflicts(captures, running)
            self._set_what_is_shared(captures)
        refuse_wrong(captures, running)
        self.configs = captures.configs
        return captures

    def _load(self, path: Path, prefix: str) -> Config | AccountConfig:
        text = read_text(path, str(path))
        try:
            data = yaml_text.read(text, self._env)
            return AccountConfig.of(data, self._env, self._parse, text) or self._parse(data, self._env, text)
        except ConfigError as error:
            raise ConfigError(*(f"{prefix}{line}" for line in error.problems)) from error

    def _add_streams(self, captures: Captures, path: Path, file: AccountConfig, running: Collection[CaptureId]) -> None:
        streams = SelectedStreams([name for name in self._streams if file.selects(name)])
        if self._find is not None and not self._streams:
            streams = self._find(file)
        names = [capture.stream for capture in running if capture.path == path and file.selects(capture.stream)]
        names += [name for name in streams.names if name not in names]
        captures.left_out |= {CaptureId(path, name): reason for name, reason in streams.left_out.items()}
        if more := names[file.max_streams :]:
            left = ", ".join(more[:_MAX_NAMED]) + (", …" if len(more) > _MAX_NAMED else "")
            text = f"{plural(len(names), 'stream')} match, and {file.max_streams} are captured; left out: {left}"
            captures.problems[CaptureId(path, _EVERY)] = (f"{path}: source.max_streams: {text}",)
        for name in names[: file.max_streams]:
            capture = CaptureId(path, name)
            try:
                captures.configs[capture] = file.capture(name)
            except ConfigError as error:
                captures.problems[capture] = tuple(f"{capture}: {line}" for line in error.problems)

    # ------------------------------------------------------------------ captures of one process

    def _leave_out_conflicts(self, captures: Captures, running: Collection[CaptureId]) -> None:
        """Report captures that conflict with earlier ones as problems; running streams come first."""
        if self.single:
            return
        owners: dict[_Identity, CaptureId] = {}
        accepted: dict[CaptureId, Config] = {}
        agreed: dict[str, tuple[str, CaptureId]] = {}
        for capture in sorted(captures.configs, key=lambda name: bool(name.stream) and name not in running):
            config = captures.configs[capture]
            claims, stated = dict(_claims(capture, config)), _stated(config)
            if self._listen is not None:
                stated.pop("http.listen", None)
            taken = next((problem(owners[claim]) for claim, problem in claims.items() if claim in owners), "")
            unusable = _unusable(capture.path.stem)
            if problem := unusable or taken or _repeated(config, accepted) or _differing(stated, agreed):
                captures.problems[capture] = (f"{capture}: {problem}",)
                continue
            accepted[capture] = config
            owners |= dict.fromkeys(claims, capture)
            for name, value in stated.items():
                agreed.setdefault(name, (value, capture))
        captures.configs = {capture: config for capture, config in captures.configs.items() if capture in accepted}

    def _set_what_is_shared(self, captures: Captures) -> None:
        samples = [file.sample for file in self._files.values() if isinstance(file, AccountConfig)]
        configs = [*captures.configs.values(), *samples]
        stated: dict[str, str] = {}
        for config in configs:
            stated = {**_stated(config), **stated}
        listen = self._listen or stated.get("http.listen", HttpConfig().listen)
        captures.listen = None if listen == _OFF else listen
        captures.listen_required = self._listen is not None or any(
            "http" in config.model_fields_set for config in configs
        )
        captures.log = LogConfig.model_validate({name: stated.get(f"log.{name}") for name in ("format", "level")})


def refuse_wrong(captures: Captures, running: Collection[CaptureId] = ()) -> None:
    """Raise ConfigError with all problems if a file or a running capture has one."""
    if any(not capture.stream or capture in running for capture in captures.problems):
        raise ConfigError(*(line for lines in captures.problems.values() for line in lines))


def only(path: Path, stream: str | None) -> Config:
    """Return the configuration of one capture: the file's, or that of `stream` if the file is for many.

    Raises ConfigError.
    """
    if stream is None:
        return load(path)
    captures = CaptureFiles([path], streams=[stream]).select()
    if captures.problems:
        raise ConfigError(*(line for lines in captures.problems.values() for line in lines))
    return next(iter(captures.configs.values()))


def _stated(config: Config) -> dict[str, str]:
    """Return the process-wide settings that this file sets."""
    stated = {f"log.{name}": getattr(config.log, name) for name in sorted(config.log.model_fields_set)}
    if config.http is None:
        return {"http.listen": _OFF, **stated}
    return {"http.listen": config.http.listen, **stated} if "listen" in config.http.model_fields_set else stated


_Identity = tuple[object, ...]


def _claims(capture: CaptureId, config: Config) -> Iterator[tuple[_Identity, Callable[[CaptureId], str]]]:
    """Yield identities that must be unique in a process, each with the error for a second owner.

    With other credentials, a consumer of the same name may belong to another account.
    """
    source, nats = config.source, config.nats
    yield (
        (capture.name,),
        lambda other: f"captures are named after their files, and {other} is called {capture.name} as well; rename one",
    )
    remedy = f'leave it out with "!{capture.stream}"' if capture.stream else "remove one of the two files"
    work = f"already captures stream {source.stream} with consumer {source.consumer}"
    yield (
        (source.stream, source.consumer, _archive(config)),
        lambda other: f"{other} {work} into this archive; {remedy}",
    )
    login = (nats.tls.cert if nats.tls else None, *nats.model_dump(include=_LOGIN).values())
    for url in nats.servers:
        yield (
            (*_server(url), nats.js_api, *login, source.stream, source.consumer),
            lambda other: (
                f"{other} {work}, and each archive would get only a part of its messages; use another consumer"
            ),
        )


def _repeated(config: Config, others: Mapping[CaptureId, Config]) -> str:
    """Return the problem if another capture with `mode: ordered` stores the same messages in the same archive."""
    source, url = config.source, _archive(config)
    for capture, other in others.items() if source.mode == "ordered" else ():
        same = (other.source.mode, other.source.stream, _archive(other)) == ("ordered", source.stream, url)
        theirs, ours = other.source.filter_subjects or (">",), source.filter_subjects or (">",)
        if same and any(overlaps(one, another) for one in theirs for another in ours):
            return f"{capture} captures some of the same subjects into this archive; set other source.filter_subjects"
    return ""


def _archive(config: Config) -> str:
    return config.store.url.removeprefix("file://").rstrip("/")


def _server(url: str) -> _Identity:
    """Return host and port of a server's address."""
    parts = urlsplit(url)
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname
    return host, parts.port or _PORTS.get(parts.scheme, 4222)


def _unusable(name: str) -> str:
    if name.isprintable() and name not in RESERVED:
        return ""
    reason = f"{name} is reserved" if name.isprintable() else "this name is not printable"
    return f"captures are named after their files, and {reason}; rename the file"


def _differing(stated: Mapping[str, str], agreed: Mapping[str, tuple[str, CaptureId]]) -> str:
    for setting, value in stated.items():
        if setting in agreed and agreed[setting][0] != value:
            expected, capture = agreed[setting]
            return f"{setting}: expected {expected}, as in {capture.path}, got {value}; {_ONE[setting]}"
    return ""
