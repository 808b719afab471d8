"""The captures of a command: read its files, find the streams that these select, and decide what can run together.

A capture is named after its file, and also after its stream if the file is for many. Captures of one process have
different names, do not do the same work twice, and agree on the HTTP address and the log, of which a process has one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Generic, NamedTuple
from urllib.parse import urlsplit

from jetcapture_py.config import yaml_text
from jetcapture_py.config.account import AccountConfig, Parse, T
from jetcapture_py.config.model import Config, HttpConfig, LogConfig, load, parse, read_text
from jetcapture_py.config.section import validated
from jetcapture_py.config.subjects import overlaps
from jetcapture_py.errors import ConfigError, JetcaptureError
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
    """A capture: its file and, if that is for many, its stream. Problems of a file or directory have no stream."""

    path: Path
    stream: str = ""

    @property
    def name(self) -> str:
        """The capture's name in logs, metrics and addresses."""
        return f"{self.path.stem}.{self.stream}" if self.stream else self.path.stem

    @property
    def whole(self) -> tuple[CaptureId, CaptureId]:
        return CaptureId(self.path), CaptureId(self.path.parent)

    def __str__(self) -> str:
        return f"{self.path}: stream {self.stream}" if self.stream else str(self.path)


@dataclass(frozen=True, slots=True)
class SelectedStreams:
    """The streams that a configuration of many selects at the moment."""

    names: Sequence[str] = ()
    """Streams to capture, sorted."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Streams that are left out, and why."""


Find = Callable[[AccountConfig[T]], SelectedStreams]
"""Finds streams. Raises JetcaptureError."""


@dataclass(slots=True)
class Captures(Generic[T]):
    """The captures of a command's files."""

    configs: dict[CaptureId, T] = field(default_factory=dict)
    """The configuration of each."""
    problems: dict[CaptureId, tuple[str, ...]] = field(default_factory=dict)
    """Problems with other files, directories and streams, one line each."""
    left_out: dict[CaptureId, str] = field(default_factory=dict)
    """Why streams are left out, although their names are selected."""
    failure: JetcaptureError | None = None
    """Why streams could not be found."""


class CaptureFiles(Generic[T]):
    """Configuration files, and directories of them. `streams` chooses captures; without it, `find` finds streams."""

    def __init__(
        self,
        arguments: Sequence[Path],
        parse: Parse[T],
        find: Find[T] | None,
        streams: Sequence[str] = (),
        env: Mapping[str, str] = os.environ,
    ) -> None:
        self.single = len(arguments) == 1 and not arguments[0].is_dir()
        """Whether there is one capture, which output need not name. Final once the files have been read."""
        self._directories = {path for path in arguments if path.is_dir()}
        self._arguments, self._parse, self._find, self._streams, self._env = arguments, parse, find, streams, env
        self._files: dict[Path, T | AccountConfig[T]] = {}
        self._broken: dict[CaptureId, tuple[str, ...]] = {}
        self._read = False
        self.configs: Mapping[CaptureId, T] = {}
        """The configurations that were selected last."""

    def shows_one(self, captures: Captures[T]) -> bool:
        """Whether a command shows its only capture in full: one of a single file for one, or one that was chosen."""
        return len(captures.configs) == 1 and not captures.problems and (self.single or len(self._streams) == 1)

    @property
    def of_many(self) -> bool:
        """Whether some file is for many streams, which may change at any time."""
        return any(isinstance(file, AccountConfig) for file in self._files.values())

    def read(self) -> None:
        """Read the files again. Errors become problems of `captures`; a file for many then stays as it was."""
        before, self._files, self._broken, again = self._files, {}, {}, self._read
        for path in self._expanded():
            try:
                file = self._load(path)
                if isinstance(file, AccountConfig) and again and self.single:
                    raise ConfigError("source.streams: restart the process to capture many streams")
                self._files[path] = file
            except ConfigError as error:
                prefix = f"{path}: " if again or not self.single else ""
                unread = error.problems[0].startswith(f"{path}: ")
                self._broken[CaptureId(path)] = tuple(line if unread else f"{prefix}{line}" for line in error.problems)
        for path, was in before.items():
            if isinstance(was, AccountConfig) and {CaptureId(path), CaptureId(path.parent)} & self._broken.keys():
                self._files.setdefault(path, was)
        self.single, self._read = self.single and not self.of_many, True

    def captures(self, running: Mapping[CaptureId, T] = MappingProxyType({})) -> Captures[T]:
        """Return the captures. Where a file or directory has a problem, its `running` captures stay as they are."""
        if not self._read:
            self.read()
        captures: Captures[T] = Captures(problems=dict(self._broken))
        for path, file in self._files.items():
            if isinstance(file, AccountConfig):
                self._add_streams(captures, path, file, running)
            elif not self._streams or file.stream_name in self._streams:
                captures.configs[CaptureId(path)] = file
        for capture, config in running.items():
            if capture not in captures.configs and self._broken.keys() & {capture, *capture.whole}:
                captures.configs[capture] = config
        streams = {config.stream_name for config in captures.configs.values()}
        streams |= {capture.stream for capture in captures.problems}
        for stream in self._streams:
            if stream not in streams and not self._broken:
                text = f"--stream: the configuration has no capture of stream {stream}"
                captures.problems[CaptureId(Path(stream))] = (text,)
        self.configs = captures.configs
        return captures

    def chosen(self) -> Captures[T]:
        """Return the captures of a command, with the problems of single streams.

        Raises ConfigError for problems of files, and JetcaptureError if streams cannot be found.
        """
        captures = self.captures()
        refuse_wrong_files(captures)
        return captures

    def _add_streams(
        self, captures: Captures[T], path: Path, file: AccountConfig[T], running: Mapping[CaptureId, T]
    ) -> None:
        """Add the captures of a file for many. A running one stays while it is selected: it ends with its stream."""
        names = [capture.stream for capture in running if capture.path == path and file.selects(capture.stream)]
        streams = SelectedStreams([name for name in self._streams if file.selects(name)])
        if self._find is not None and not self._streams:
            try:
                streams = self._find(file)
            except JetcaptureError as error:
                captures.failure = error
                captures.problems[CaptureId(path)] = (f"{path}: {error}",)
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
                if capture in running:
                    captures.configs[capture] = running[capture]

    def _expanded(self) -> list[Path]:
        """Return all files; mark directories that are gone, unreadable or empty as broken."""
        files: dict[Path, None] = {}
        for argument in self._arguments:
            try:
                files.update(dict.fromkeys(yaml_text.expand([argument], self._directories)))
            except ConfigError as error:
                self._broken[CaptureId(argument)] = error.problems
        return list(files)

    def _load(self, path: Path) -> T | AccountConfig[T]:
        data = yaml_text.read(read_text(path, str(path)), self._env)
        return AccountConfig.of(data, self._env, self._parse) or self._parse(data, self._env)


def refuse_wrong_files(captures: Captures[T]) -> None:
    """Raise the reason why streams could not be found, or ConfigError for problems of files and directories."""
    if captures.failure is not None:
        raise captures.failure
    if lines := [line for capture, lines in captures.problems.items() if not capture.stream for line in lines]:
        raise ConfigError(*lines)


def only(path: Path, stream: str | None) -> Config:
    """Return the configuration of one capture: that of the file, or of `stream` if the file is for many.

    Raises ConfigError.
    """
    if stream is None:
        return load(path)
    captures = ConfigFiles([path], streams=[stream]).chosen()
    if captures.problems:
        raise ConfigError(*(line for lines in captures.problems.values() for line in lines))
    return next(iter(captures.configs.values()))


# ---------------------------------------------------------------------- captures of one process


@dataclass(slots=True, kw_only=True)
class SelectedConfigs(Captures[Config]):
    """The captures that should run in a process, and what they share.

    `problems` also has those of running captures' new configurations.
    """

    listen: str | None
    """The address of the HTTP server; None without one."""
    listen_required: bool
    """Whether the address was configured, so that a port in use is an error."""
    log: LogConfig
    """The first format and level that a file states."""


class ConfigFiles(CaptureFiles[Config]):
    """The configuration files of a process. `listen` overrides their `http`. Raises ConfigError if it is wrong.

    With `together`, `chosen` also refuses captures that cannot run in one process.
    """

    def __init__(
        self,
        arguments: Sequence[Path],
        listen: str | None = None,
        env: Mapping[str, str] = os.environ,
        *,
        find: Find[Config] | None = None,
        streams: Sequence[str] = (),
        together: bool = True,
    ) -> None:
        super().__init__(arguments, parse, find, streams, env)
        self._together = together
        if listen is not None:
            section, rename = {"listen": listen}, lambda line: line.replace("listen:", "--http:", 1)
            listen = validated(HttpConfig, section, rename=rename).listen
        self._listen = listen

    def chosen(self) -> Captures[Config]:
        """See `CaptureFiles.chosen`."""
        if not self._together:
            return super().chosen()
        selected = self.select()
        refuse_wrong_files(selected)
        return selected

    def select(
        self, running: Mapping[CaptureId, Config] = MappingProxyType({}), *, again: bool = True
    ) -> SelectedConfigs:
        """Return the captures that should run. Where something has a problem, its `running` captures stay as they are.

        Unless the files are to be read `again`, only the streams are looked up.
        """
        if again:
            self.read()
        found = self.captures(running)
        configs, refused = found.configs, found.problems
        while conflicts := self._conflicts(configs, running):
            for capture, problem in conflicts.items():
                refused[capture] = (f"{capture}: {problem}",)
                if capture in running and configs[capture] != running[capture]:
                    configs[capture] = running[capture]
                else:
                    del configs[capture]
        samples = [file.sample for file in self._files.values() if isinstance(file, AccountConfig)]
        stated: dict[str, str] = {}
        for config in (*configs.values(), *samples):
            stated = {**_stated(config), **stated}
        listen = self._listen or stated.get("http.listen", HttpConfig().listen)
        return SelectedConfigs(
            configs=configs,
            problems=refused,
            left_out=found.left_out,
            failure=found.failure,
            listen=None if listen == _OFF else listen,
            listen_required=self._listen is not None
            or any("http" in config.model_fields_set for config in (*configs.values(), *samples)),
            log=LogConfig.model_validate({name: stated.get(f"log.{name}") for name in ("format", "level")}),
        )

    def _conflicts(
        self, configs: Mapping[CaptureId, Config], running: Mapping[CaptureId, Config]
    ) -> dict[CaptureId, str]:
        """Return the problems of captures that cannot run with the ones before them; unchanged ones come first."""
        conflicts: dict[CaptureId, str] = {}
        owners: dict[_Identity, CaptureId] = {}
        agreed: dict[str, tuple[str, CaptureId]] = {}
        for capture in sorted(configs, key=lambda capture: running.get(capture) != configs[capture]):
            claims = {} if self.single else dict(_claims(capture, configs[capture]))
            stated = {} if self.single else _stated(configs[capture])
            if self._listen is not None:
                stated.pop("http.listen", None)
            taken = next((problem(owners[claim]) for claim, problem in claims.items() if claim in owners), "")
            repeated = _repeated(configs[capture], {other: configs[other] for other in owners.values()})
            unusable = "" if self.single else _unusable(capture.path.stem)
            if problem := unusable or taken or repeated or _differing(stated, agreed):
                conflicts[capture] = problem
                continue
            owners |= dict.fromkeys(claims, capture)
            for name, value in stated.items():
                agreed.setdefault(name, (value, capture))
        return conflicts


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
    """Return host, port and credentials of a server's address."""
    parts = urlsplit(url)
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname
    return host, parts.port or _PORTS.get(parts.scheme, 4222), parts.username, parts.password


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
