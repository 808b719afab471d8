"""Several configurations for one process: read the files, and decide which of them can run together.

A capture is named after its file. Captures of one process have different names, do not do the same work twice, and
agree on the HTTP address and the log, of which a process has one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import ValidationError

from jetcapture_py.config.files import expand, is_single
from jetcapture_py.config.messages import problems
from jetcapture_py.config.model import Config, HttpConfig, LogConfig, loads, read_text
from jetcapture_py.errors import ConfigError

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """The configurations that run together, by file, and the problems of the others: one line or more per file."""

    configs: Mapping[Path, Config]
    problems: Mapping[Path, tuple[str, ...]]

    @property
    def lines(self) -> tuple[str, ...]:
        """All problems."""
        return tuple(line for each in self.problems.values() for line in each)


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """What a process keeps as long as it runs: the address of its HTTP server, None without one, and what is imported.

    `listen_required`: the address was asked for, so a port in use is an error.
    """

    listen: str | None
    listen_required: bool
    user_code: bool
    websockets: bool


class ConfigFiles:
    """The configuration files of a process. `listen` overrides their `http`. Raises ConfigError if it is wrong."""

    def __init__(
        self, arguments: Sequence[Path], listen: str | None = None, env: Mapping[str, str] = os.environ
    ) -> None:
        self.single = is_single(arguments)
        self._directories = {path for path in arguments if path.is_dir()}
        self._arguments, self._env = arguments, env
        self._listen = None if listen is None else _checked(listen)

    def read(self) -> Selected:
        """Read all files at the start. Raises ConfigError if none of them can be used."""
        found = self._select({}, None)
        if not found.configs:
            raise ConfigError(*found.lines)
        return found

    def read_again(self, running: Mapping[Path, Config], process: Process) -> Selected:
        """Read all files while `running` run: where a file or directory has a problem, what runs of it stays."""
        return self._select(running, process)

    def process(self, configs: Iterable[Config]) -> Process:
        """Return what these captures share."""
        configs = list(configs)
        listen: str | None = HttpConfig().listen
        stated = [value for each in configs if (value := _stated(each).get("http.listen")) is not None]
        if stated:
            listen = None if stated[0] == _OFF else stated[0]
        return Process(
            listen=self._listen or listen,
            listen_required=self._listen is not None or any("http" in each.model_fields_set for each in configs),
            user_code=any(each.has_user_code for each in configs),
            websockets=any(each.nats.has_websockets for each in configs),
        )

    def _select(self, running: Mapping[Path, Config], process: Process | None) -> Selected:
        refused: dict[Path, tuple[str, ...]] = {}
        wanted: dict[Path, Config] = {}
        for path in self._expanded(refused):
            try:
                wanted[path] = self._load(path, prefix=process is not None or not self.single)
            except ConfigError as error:
                refused[path] = error.problems
                if path in running:
                    wanted[path] = running[path]
        wanted |= {path: config for path, config in running.items() if path not in wanted and path.parent in refused}
        while found := self._conflicts(wanted, running, process):
            for path, problem in found.items():
                refused[path] = (f"{path}: {problem}",)
                if path in running and wanted[path] != running[path]:
                    wanted[path] = running[path]
                else:
                    del wanted[path]
        return Selected(configs=wanted, problems=refused)

    def _expanded(self, refused: dict[Path, tuple[str, ...]]) -> list[Path]:
        """Return all files; add directories that are gone, cannot be read or have none to `refused`."""
        found: dict[Path, None] = {}
        for argument in self._arguments:
            try:
                found.update(dict.fromkeys(expand([argument], self._directories)))
            except ConfigError as error:
                refused[argument] = error.problems
        return list(found)

    def _load(self, path: Path, *, prefix: bool) -> Config:
        text = read_text(path, str(path))
        try:
            return loads(text, self._env)
        except ConfigError as error:
            found = error.problems
        raise ConfigError(*(f"{path}: {problem}" if prefix else problem for problem in found))

    def _conflicts(
        self, wanted: Mapping[Path, Config], running: Mapping[Path, Config], process: Process | None
    ) -> dict[Path, str]:
        """Return the problems of files that cannot run with the ones before them; unchanged ones come first."""
        found: dict[Path, str] = {}
        taken: dict[_Identity, Path] = {}
        agreed: dict[str, tuple[str, Path]] = {}
        for path in sorted(wanted, key=lambda each: running.get(each) != wanted[each]):
            config = wanted[path]
            stated = {} if self.single else _stated(config)
            if self._listen is not None:
                stated.pop("http.listen", None)
            problem = (
                self._fixed(config, process)
                or (not self.single and _taken(path, config, taken))
                or _differing(stated, agreed)
            )
            if problem:
                found[path] = problem
                continue
            name, work, consumers = _identities(path, config)
            taken.update(dict.fromkeys((name, work, *consumers), path))
            for setting, value in stated.items():
                agreed.setdefault(setting, (value, path))
        return found

    def _fixed(self, config: Config, process: Process | None) -> str:
        """Return which setting asks for something that only a restart of the process can change, if any."""
        if process is None:
            return ""
        listen, now = _stated(config).get("http.listen"), process.listen or _OFF
        if self._listen is None and listen not in (None, now):
            return f"http.listen: expected {now}, as when the process started, got {listen}; restart the process"
        if config.has_user_code and not process.user_code:
            return "the process started without support for your own code; restart the process to use it"
        if config.nats.has_websockets and not process.websockets:
            return "nats.servers: the process started without support for ws:// and wss://; restart it to use them"
        return ""


def log_settings(configs: Iterable[Config]) -> LogConfig:
    """Return the log's settings: the first stated format and level."""
    stated: dict[str, str] = {}
    for config in configs:
        stated = {**_stated(config), **stated}
    return LogConfig.model_validate({name: stated.get(f"log.{name}") for name in ("format", "level")})


def _stated(config: Config) -> dict[str, str]:
    """Return those settings of the process that the file states."""
    found: dict[str, str] = {}
    if config.http is None:
        found["http.listen"] = _OFF
    elif "listen" in config.http.model_fields_set:
        found["http.listen"] = config.http.listen
    for name in sorted(config.log.model_fields_set):
        found[f"log.{name}"] = getattr(config.log, name)
    return found


_Identity = tuple[object, ...]


def _identities(path: Path, config: Config) -> tuple[_Identity, _Identity, list[_Identity]]:
    """Return what no two captures of a process share: name, work, and the consumer as known to each server.

    With other credentials, a consumer of the same name may belong to another account.
    """
    source, nats = config.source, config.nats
    login = (nats.tls.cert if nats.tls else None, *nats.model_dump(include=_LOGIN).values())
    work = source.stream, source.consumer, config.store.url.removeprefix("file://").rstrip("/")
    consumers: list[_Identity] = [
        (*_server(url), nats.js_api, *login, source.stream, source.consumer) for url in nats.servers
    ]
    return (path.stem,), work, consumers


def _server(url: str) -> _Identity:
    """Return host, port and credentials of a server's address."""
    parts = urlsplit(url)
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname
    return host, parts.port or _PORTS.get(parts.scheme, 4222), parts.username, parts.password


def _taken(path: Path, config: Config, taken: Mapping[_Identity, Path]) -> str:
    name, work, consumers = _identities(path, config)
    source = config.source
    if not path.stem.isprintable():
        return "captures are named after their files, and this name is not printable; rename the file"
    if path.stem in RESERVED:
        return f"captures are named after their files, and {path.stem} is reserved; rename the file"
    if name in taken:
        return f"captures are named after their files, and {taken[name]} is called {path.stem} as well; rename one"
    if work in taken:
        return (
            f"{taken[work]} already captures stream {source.stream} with consumer {source.consumer} into this archive; "
            "remove one of the two files"
        )
    for consumer in consumers:
        if consumer in taken:
            return (
                f"{taken[consumer]} already captures stream {source.stream} with consumer {source.consumer}, and each "
                "archive would get only a part of its messages; use another consumer"
            )
    return ""


def _differing(stated: Mapping[str, str], agreed: Mapping[str, tuple[str, Path]]) -> str:
    for setting, value in stated.items():
        if setting in agreed and agreed[setting][0] != value:
            expected, path = agreed[setting]
            return f"{setting}: expected {expected}, as in {path}, got {value}; {_ONE[setting]}"
    return ""


def _checked(listen: str) -> str:
    try:
        return HttpConfig.model_validate({"listen": listen}).listen
    except ValidationError as error:
        found = problems(error, HttpConfig)
    raise ConfigError(*(line.replace("listen:", "--http:", 1) for line in found))
