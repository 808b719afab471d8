"""The captures of a command: read its files, find the streams that these select, and decide what can run together.

A capture is named after its file, and also after its stream if the file is for many. Captures of one process have
different names, do not do the same work twice, and agree on the HTTP address and the log, of which a process has one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from jetcapture_py.config import yaml_text
from jetcapture_py.config.account import AccountConfig, Parse
from jetcapture_py.config.model import Config, HttpConfig, LogConfig, load, parse, read_text
from jetcapture_py.config.section import validated
from jetcapture_py.config.subjects import overlaps
from jetcapture_py.errors import ConfigError
from jetcapture_py.text import plural

CAPTURES_AT_ONCE = 8
"""Maximum captures that a command examines at the same time."""
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
"""In place of a stream, in the id of a problem with what a file selects."""
_MAX_NAMED = 10
"""Streams that a problem names."""


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
    """The streams that a configuration of many selects at the moment."""

    names: Sequence[str] = ()
    """Streams to capture, sorted."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Streams that are left out, and why."""


Find = Callable[[AccountConfig], SelectedStreams]
"""Finds streams. Raises JetcaptureError."""


@dataclass(slots=True, kw_only=True)
class Captures:
    """The captures of a command's files, and what they share in one process."""

    configs: dict[CaptureId, Config] = field(default_factory=dict)
    """The configuration of each."""
    problems: dict[CaptureId, tuple[str, ...]] = field(default_factory=dict)
    """Why selected streams cannot be captured, one line each."""
    left_out: dict[CaptureId, str] = field(default_factory=dict)
    """Why streams are left out, although their names are selected."""
    listen: str | None = None
    """The address of the HTTP server; None without one."""
    listen_required: bool = False
    """Whether the address was configured, so that a port in use is an error."""
    log: LogConfig = field(default_factory=LogConfig)
    """First format and level set in a file."""


class CaptureFiles:
    """Configuration files, and directories of them, as they are now. `streams` chooses captures; else `find` does.

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
        self._files: dict[Path, Config | AccountConfig] = {}
        self.configs: Mapping[CaptureId, Config] = {}
        """The configurations that were selected last."""
        one = len(arguments) == 1 and not arguments[0].is_dir()
        problems: list[str] = []
        paths: dict[Path, None] = {}
        for argument in arguments:
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
        """Whether a file is for many streams, which may change at any time."""
        self.single = one and not self.of_many
        """Whether there is only one capture, so that output omits its name."""

    def again(self) -> CaptureFiles:
        """Read the same files again. Raises ConfigError."""
        files = CaptureFiles(
            self._arguments,
            self._listen,
            self._env,
            find=self._find,
            streams=self._streams,
            together=self._together,
            parse=self._parse,
        )
        if files.single is not self.single:
            raise ConfigError("source.streams: restart the process to change between one stream and many")
        return files

    def shows_one(self, captures: Captures) -> bool:
        """Whether a command shows its only capture in full: one of a single file for one, or one that was chosen."""
        return len(captures.configs) == 1 and not captures.problems and (self.single or len(self._streams) == 1)

    def select(self, running: Collection[CaptureId] = ()) -> Captures:
        """Return the captures to run. A `running` capture stays while it is selected: it ends with its stream.

        Raises ConfigError if captures exclude one another or a running one has become wrong, and JetcaptureError if
        streams cannot be found.
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
        for capture in sorted(captures.configs, key=lambda each: bool(each.stream) and each not in running):
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
        captures.listen_required = self._listen is not None or any("http" in each.model_fields_set for each in configs)
        captures.log = LogConfig.model_validate({name: stated.get(f"log.{name}") for name in ("format", "level")})


def refuse_wrong(captures: Captures, running: Collection[CaptureId] = ()) -> None:
    """Raise ConfigError with all problems if a file has one, or a stream whose capture runs."""
    if any(not capture.stream or capture in running for capture in captures.problems):
        raise ConfigError(*(line for lines in captures.problems.values() for line in lines))


def only(path: Path, stream: str | None) -> Config:
    """Return the configuration of one capture: that of the file, or of `stream` if the file is for many.

    Raises ConfigError.
    """
    if stream is None:
        return load(path)
    captures = CaptureFiles([path], streams=[stream]).select()
    if captures.problems:
        raise ConfigError(*(line for lines in captures.problems.values() for line in lines))
    return next(iter(captures.configs.values()))


def _stated(config: Config) -> dict[str, str]:
    """Return those settings of the process that the file states."""
    stated = {f"log.{name}": getattr(config.log, name) for name in sorted(config.log.model_fields_set)}
    if config.http is None:
        return {"http.listen": _OFF, **stated}
    return {"http.listen": config.http.listen, **stated} if "listen" in config.http.model_fields_set else stated


_Identity = tuple[object, ...]


def _claims(capture: CaptureId, config: Config) -> Iterator[tuple[_Identity, Callable[[CaptureId], str]]]:
    """Yield what no two captures of a process share, each with the problem when another file has it already.

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
        theirs, own = other.source.filter_subjects or (">",), source.filter_subjects or (">",)
        if same and any(overlaps(one, another) for one in theirs for another in own):
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
