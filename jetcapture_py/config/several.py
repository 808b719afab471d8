"""Several configurations for one process: read the files, and decide which of them can run together.

A capture is named after its file. Captures of one process have different names, do not do the same work twice, and
agree on the HTTP address and the log, of which a process has one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

from jetcapture_py.config.model import Config, HttpConfig, LogConfig, loads, read_text
from jetcapture_py.config.section import validated
from jetcapture_py.config.subjects import overlaps
from jetcapture_py.config.yaml_text import expand
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
class SelectedConfigs:
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
        self.single = len(arguments) == 1 and not arguments[0].is_dir()
        self._directories = {path for path in arguments if path.is_dir()}
        self._arguments, self._env = arguments, env
        if listen is not None:
            section, rename = {"listen": listen}, lambda line: line.replace("listen:", "--http:", 1)
            listen = validated(HttpConfig, section, rename=rename).listen
        self._listen = listen

    def select(self, running: Mapping[Path, Config] = MappingProxyType({})) -> SelectedConfigs:
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
        return SelectedConfigs(
            configs=configs,
            problems=refused,
            listen=None if listen == _OFF else listen,
            listen_required=self._listen is not None
            or any("http" in config.model_fields_set for config in configs.values()),
            log=LogConfig.model_validate({name: stated.get(f"log.{name}") for name in ("format", "level")}),
        )

    def _expanded(self, refused: dict[Path, tuple[str, ...]]) -> list[Path]:
        """Return all files; add directories that are gone, cannot be read or have none to `refused`."""
        files: dict[Path, None] = {}
        for argument in self._arguments:
            try:
                files.update(dict.fromkeys(expand([argument], self._directories)))
            except ConfigError as error:
                refused[argument] = error.problems
        return list(files)

    def _load(self, path: Path, *, prefix: bool) -> Config:
        text = read_text(path, str(path))
        try:
            return loads(text, self._env)
        except ConfigError as error:
            problems = error.problems
        raise ConfigError(*(f"{path}: {problem}" if prefix else problem for problem in problems))

    def _conflicts(self, configs: Mapping[Path, Config], running: Mapping[Path, Config]) -> dict[Path, str]:
        """Return the problems of files that cannot run with the ones before them; unchanged ones come first."""
        conflicts: dict[Path, str] = {}
        owners: dict[_Identity, Path] = {}
        agreed: dict[str, tuple[str, Path]] = {}
        for path in sorted(configs, key=lambda path: running.get(path) != configs[path]):
            claims = {} if self.single else dict(_claims(path, configs[path]))
            stated = {} if self.single else _stated(configs[path])
            if self._listen is not None:
                stated.pop("http.listen", None)
            taken = next((problem(owners[claim]) for claim, problem in claims.items() if claim in owners), "")
            repeated = _repeated(configs[path], {other: configs[other] for other in owners.values()})
            unusable = "" if self.single else _unusable(path.stem)
            if problem := unusable or taken or repeated or _differing(stated, agreed):
                conflicts[path] = problem
                continue
            owners |= dict.fromkeys(claims, path)
            for name, value in stated.items():
                agreed.setdefault(name, (value, path))
        return conflicts


def _stated(config: Config) -> dict[str, str]:
    """Return those settings of the process that the file states."""
    stated = {f"log.{name}": getattr(config.log, name) for name in sorted(config.log.model_fields_set)}
    if config.http is None:
        return {"http.listen": _OFF, **stated}
    return {"http.listen": config.http.listen, **stated} if "listen" in config.http.model_fields_set else stated


_Identity = tuple[object, ...]


def _claims(path: Path, config: Config) -> Iterator[tuple[_Identity, Callable[[Path], str]]]:
    """Yield what no two captures of a process share, each with the problem when another file has it already.

    With other credentials, a consumer of the same name may belong to another account.
    """
    source, nats = config.source, config.nats
    yield (
        (path.stem,),
        lambda other: f"captures are named after their files, and {other} is called {path.stem} as well; rename one",
    )
    work = f"already captures stream {source.stream} with consumer {source.consumer}"
    yield (
        (source.stream, source.consumer, _archive(config)),
        lambda other: f"{other} {work} into this archive; remove one of the two files",
    )
    login = (nats.tls.cert if nats.tls else None, *nats.model_dump(include=_LOGIN).values())
    for url in nats.servers:
        yield (
            (*_server(url), nats.js_api, *login, source.stream, source.consumer),
            lambda other: (
                f"{other} {work}, and each archive would get only a part of its messages; use another consumer"
            ),
        )


def _repeated(config: Config, others: Mapping[Path, Config]) -> str:
    """Return the problem if another capture with `mode: ordered` stores the same messages in the same archive."""
    source, url = config.source, _archive(config)
    for path, other in others.items() if source.mode == "ordered" else ():
        same = (other.source.mode, other.source.stream, _archive(other)) == ("ordered", source.stream, url)
        theirs, own = other.source.filter_subjects or (">",), source.filter_subjects or (">",)
        if same and any(overlaps(one, another) for one in theirs for another in own):
            return f"{path} captures some of the same subjects into this archive; set other source.filter_subjects"
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


def _differing(stated: Mapping[str, str], agreed: Mapping[str, tuple[str, Path]]) -> str:
    for setting, value in stated.items():
        if setting in agreed and agreed[setting][0] != value:
            expected, path = agreed[setting]
            return f"{setting}: expected {expected}, as in {path}, got {value}; {_ONE[setting]}"
    return ""
