"""Several configurations for one process: read the files, and decide which of them can run together.

A capture is named after its file. Captures of one process have different names, do not do the same work twice, and
agree on the HTTP address and the log, of which a process has one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
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
    """The captures that should run in a process, and what they share."""

    configs: Mapping[Path, Config]
    """The configuration of each, by file."""
    problems: Mapping[Path, tuple[str, ...]]
    """Problems with other files and directories, or with a running capture's new configuration, one line each."""
    listen: str | None
    """The address of the HTTP server; None without one."""
    listen_required: bool
    """Whether the address was configured, so that a port in use is an error."""
    log: LogConfig
    """The first format and level that a file states."""


class ConfigFiles:
    """The configuration files of a process. `listen` overrides their `http`. Raises ConfigError if it is wrong."""

    def __init__(
        self, arguments: Sequence[Path], listen: str | None = None, env: Mapping[str, str] = os.environ
    ) -> None:
        self.single = is_single(arguments)
        self._directories = {path for path in arguments if path.is_dir()}
        self._arguments, self._env = arguments, env
        self._listen = None if listen is None else _checked(listen)

    def select(self, running: Mapping[Path, Config] = MappingProxyType({})) -> Selected:
        """Read all files while `running` run: where a file or directory has a problem, what runs of it stays."""
        refused: dict[Path, tuple[str, ...]] = {}
        configs: dict[Path, Config] = {}
        for path in self._expanded(refused):
            try:
                configs[path] = self._load(path, prefix=bool(running) or not self.single)
            except ConfigError as error:
                refused[path] = error.problems
                if path in running:
                    configs[path] = running[path]
        configs |= {path: config for path, config in running.items() if path not in configs and path.parent in refused}
        while conflicts := self._conflicts(configs, running):
            for path, problem in conflicts.items():
                refused[path] = (f"{path}: {problem}",)
                if path in running and configs[path] != running[path]:
                    configs[path] = running[path]
                else:
                    del configs[path]
        stated: dict[str, str] = {}
        for config in configs.values():
            stated = {**_stated(config), **stated}
        listen = self._listen or stated.get("http.listen", HttpConfig().listen)
        return Selected(
            configs=configs,
            problems=refused,
            listen=None if listen == _OFF else listen,
            listen_required=self._listen is not None
            or any("http" in each.model_fields_set for each in configs.values()),
            log=LogConfig.model_validate({name: stated.get(f"log.{name}") for name in ("format", "level")}),
        )

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

    def _conflicts(self, configs: Mapping[Path, Config], running: Mapping[Path, Config]) -> dict[Path, str]:
        """Return the problems of files that cannot run with the ones before them; unchanged ones come first."""
        found: dict[Path, str] = {}
        taken: dict[_Identity, Path] = {}
        agreed: dict[str, tuple[str, Path]] = {}
        for path in sorted(configs, key=lambda path: running.get(path) != configs[path]):
            config = configs[path]
            stated = {} if self.single else _stated(config)
            if self._listen is not None:
                stated.pop("http.listen", None)
            problem = (not self.single and _taken(path, config, taken)) or _differing(stated, agreed)
            if problem:
                found[path] = problem
                continue
            name, work, consumers = _identities(path, config)
            taken.update(dict.fromkeys((name, work, *consumers), path))
            for setting, value in stated.items():
                agreed.setdefault(setting, (value, path))
        return found


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
