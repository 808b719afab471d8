"""Options shared by several commands: times, durations, an archive, and the login of a server."""

# No `from __future__ import annotations`: typer would evaluate the text of every annotation, 5 ms per start.
# Whatever needs more than typer is imported by the functions, for the same reason.

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, overload

import typer

from jetcapture_py.errors import ConfigError

if TYPE_CHECKING:
    from jetcapture_py.config.captures import Find
    from jetcapture_py.config.model import Config, NatsConfig
    from jetcapture_py.reading.columns import Types
    from jetcapture_py.reading.selection import Latest, Selection

T = TypeVar("T")

WHEN = "2026-05-01T12:00:00Z, a date, today, yesterday, or how long ago, such as 1h"
"""Accepted forms of a time."""
SECRETS = {
    "user": "NATS_USER",
    "password": "NATS_PASSWORD",
    "token": "NATS_TOKEN",
    "nkey_seed": "NATS_NKEY_SEED",
    "user_jwt": "NATS_USER_JWT",
    "user_seed": "NATS_USER_SEED",
}
"""Settings of `nats` that --servers takes from the environment: every user of a machine sees its command lines."""
_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
SQL_MAY_BEGIN_WITH_A_COMMENT = {"ignore_unknown_options": True}
"""Context settings of a command with an argument SQL; `chosen_archive` refuses options that are misspelt."""

# ---------------------------------------------------------------------- what to work on

Configs = Annotated[
    list[Path],
    typer.Argument(
        metavar="CONFIG", help="Configuration files, YAML, or directories of them, of one or many captures."
    ),
]
OneConfig = Annotated[Path, typer.Argument(metavar="CONFIG", help="The configuration file, YAML.")]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="The capture's configuration, instead of URL STREAM.")
]
Archive = Annotated[
    list[str],
    typer.Argument(metavar="CONFIG | URL STREAM", help="The configuration file; or store.url and the stream."),
]
"""For `chosen_archive`."""
StoreOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="NAME=VALUE",
        help="One of store.options: anon=true, 'key=${S3_KEY}', 'client_kwargs={region_name: eu-west-1}'; repeatable.",
    ),
]
Streams = Annotated[
    list[str] | None, typer.Option("--stream", metavar="STREAM", help="Only the captures of this stream; repeatable.")
]
OneStream = Annotated[
    str | None, typer.Option("--stream", metavar="STREAM", help="The stream, if the configuration is for many.")
]

# ---------------------------------------------------------------------- which messages

Start = Annotated[str | None, typer.Option("--from", "--since", metavar="TIME", help=f"Inclusive; {WHEN}.")]
End = Annotated[str | None, typer.Option("--to", metavar="TIME", help="Exclusive; as --from.")]
Keys = Annotated[
    list[str] | None, typer.Option("--key", metavar="KEY", help='Repeatable; "" for messages without a key.')
]
EventStart = Annotated[
    str | None, typer.Option("--event-from", metavar="TIME", help="Like --from, by the time in block.time.")
]
EventEnd = Annotated[
    str | None, typer.Option("--event-to", metavar="TIME", help="Like --to, by the time in block.time.")
]
CompleteOnly = Annotated[
    bool,
    typer.Option(
        "--complete-only",
        help="Only what is complete by the watermark's time: messages up to it, or a report's time slices.",
    ),
]
DedupeOption = Annotated[
    Literal["auto", "full", "none"],
    typer.Option(
        "--dedupe",
        help="Which copies of a message to drop. auto: those under its key and time slice, enough unless `key` "
        "or block.interval changed; full: compare all messages (slow); none.",
    ),
]
ParquetOnly = Annotated[
    bool,
    typer.Option("--parquet-only", help="Skip objects in formats other than Parquet, which are an error otherwise."),
]

By = Annotated[
    list[str] | None,
    typer.Option(
        "--by",
        metavar="COLUMN",
        help="Key of the view latest, which has the newest row of each: a column or an SQL expression; repeatable.",
    ),
]
Order = Annotated[
    str,
    typer.Option(
        "--order", metavar="COLUMN", help="What is greatest in the newest row of latest: a column or an SQL expression."
    ),
]
Deleted = Annotated[
    str | None,
    typer.Option(
        "--deleted",
        metavar="CONDITION",
        help="SQL, such as \"op = 'd'\": a key whose newest row meets it is not in latest.",
    ),
]


def selection_of(
    start: str | None,
    end: str | None,
    keys: Sequence[str] | None = None,
    event_start: str | None = None,
    event_end: str | None = None,
) -> "Selection":
    """Return the selection of --from, --to, --key, --event-from and --event-to. Raises ConfigError."""
    from jetcapture_py.reading.selection import Selection

    return Selection(
        start=time_option("--from", start),
        end=time_option("--to", end),
        keys=[key or None for key in keys or ()] or None,
        event_start=time_option("--event-from", event_start),
        event_end=time_option("--event-to", event_end),
    )


def latest_of(by: Sequence[str] | None, order: str, deleted: str | None) -> "Latest | None":
    """Return what the view `latest` is by --by, --order and --deleted; None without --by. Raises ConfigError."""
    from jetcapture_py.archive.layout import SEQ
    from jetcapture_py.reading.selection import Latest

    refuse((not by and order != SEQ, "--order needs --by"), (not by and deleted is not None, "--deleted needs --by"))
    return Latest(by=by, order=order, deleted=deleted) if by else None


def types_of(texts: Iterable[str] | None) -> "Types":
    """Return the types of --type. Raises ConfigError."""
    from jetcapture_py.reading.columns import read_types

    def parse(text: str) -> tuple[str, str]:
        name, equals, type_ = text.rpartition("=")
        if not equals or not name:
            raise ValueError("expected COLUMN=TYPE")
        return name, type_

    return read_types(dict(option("--type", parse, texts)))


# ---------------------------------------------------------------------- how to work

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, a line for each capture, or for what is listed.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be done without doing it.")]

# ---------------------------------------------------------------------- a server

NatsFile = Annotated[
    Path | None,
    typer.Option("--nats", metavar="FILE", help="Servers and login: the section `nats` of this YAML file."),
]
Context = Annotated[
    str | None, typer.Option("--context", metavar="CONTEXT", help='A NATS CLI context; "": the selected one.')
]
Servers = Annotated[
    list[str] | None,
    typer.Option(
        "--servers",
        metavar="URL",
        help="NATS server; repeatable. A login comes from the environment: NATS_USER and NATS_PASSWORD, NATS_TOKEN, "
        "NATS_NKEY_SEED, or NATS_USER_JWT and NATS_USER_SEED.",
    ),
]


def login(
    file: Path | None,
    context: str | None,
    servers: Sequence[str] | None,
    *,
    default: "NatsConfig | None",
    env: Mapping[str, str] = os.environ,
) -> "NatsConfig":
    """Return the server and login of --nats, --context or --servers; else `default`. Raises ConfigError."""
    from jetcapture_py.config.model import NatsConfig
    from jetcapture_py.config.section import validated

    if file is not None:
        if context is not None or servers:
            raise ConfigError("--nats: cannot be combined with --context or --servers")
        return _section_of(file, env)
    if context is None and not servers:
        if default is None:
            raise ConfigError("--servers: missing (or --nats or --context, or the capture's configuration)")
        return default
    settings: dict[str, Any] = {"servers": servers or None, "context": context}
    if context is None:
        settings |= {name: env.get(variable) or None for name, variable in SECRETS.items()}
        if settings["user"] is None:
            settings["password"] = None  # a configuration may refer to NATS_PASSWORD

    def named(problem: str) -> str:
        name, colon, reason = problem.partition(":")
        return f"{SECRETS.get(name, f'--{name}')}{colon}{reason}"

    return validated(NatsConfig, settings, env=env, rename=named)


def _section_of(file: Path, env: Mapping[str, str]) -> "NatsConfig":
    from jetcapture_py.config import yaml_text
    from jetcapture_py.config.model import NatsConfig, read_text
    from jetcapture_py.config.section import validated

    text = read_text(file, str(file))
    try:
        data = yaml_text.read(text, env)
    except ConfigError as error:
        raise ConfigError(*(f"{file}: {problem}" for problem in error.problems)) from error
    section = data.get("nats") if isinstance(data, dict) else None
    if not isinstance(section, dict):
        raise ConfigError(f"{file}: expected a section nats")
    return validated(
        NatsConfig, section, env=env, rename=lambda problem: f"{file}: {problem}", text=text, section="nats"
    )


# ---------------------------------------------------------------------- an archive


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenArchive:
    """The archive that a command line names."""

    url: str
    stream: str
    options: Mapping[str, Any] = field(repr=False)
    """The `store.options`, which may be secrets."""
    config: "Config | None" = None
    """The capture's configuration, if named by the command line."""
    statement: str | None = None
    """SQL that follows the archive."""

    @property
    def login(self) -> "NatsConfig | None":
        """The capture's servers and login."""
        return None if self.config is None else self.config.nats


def chosen_archive(
    words: Sequence[str] | None,
    options: Iterable[str] | None = None,
    stream: str | None = None,
    *,
    config: Path | None = None,
    sql: str = "",
) -> ChosenArchive:
    """Return the archive of `CONFIG` or `URL STREAM`. Raises ConfigError.

    Text that is neither a directory nor has a scheme is a configuration; `stream` chooses one of many. `config` is the
    value of --config, if given instead. `sql` is the usage text of a further argument: `SQL`, `[SQL]` or "".
    """
    from jetcapture_py.config.captures import only
    from jetcapture_py.config.values import parse_option

    given = dict(option("--option", parse_option, options))
    words = [*([] if config is None else [str(config)]), *(words or ())]
    if not words:
        raise ConfigError(f"expected {_usage('CONFIG', sql)} or {_usage('URL STREAM', sql)}")
    first, *rest = words
    chosen = None
    if _is_url(first):
        usage = _usage("URL STREAM", sql)
        if not rest or any(map(str.isspace, rest[0])):  # a statement in its place
            raise ConfigError(f"STREAM is missing: expected {usage}")
        url, stream = first, rest.pop(0)
    else:
        usage, chosen = _usage("CONFIG", sql), only(Path(first), stream)
        url, stream = chosen.store.url, chosen.source.stream
        given = dict(chosen.store.options) | given
    unexpected = [word for word in rest if _is_option(word)] or rest[1 if sql else 0 :]
    if unexpected:
        raise ConfigError(f"unexpected argument {unexpected[0]}: expected {usage}")
    if sql == "SQL" and not rest:
        raise ConfigError(f"SQL is missing: expected {usage}")
    return ChosenArchive(url=url, stream=stream, options=given, config=chosen, statement=next(iter(rest), None))


def chosen_archives(
    words: Sequence[str], options: Iterable[str] | None, stream: str | None, *, find: "Find"
) -> tuple[list[ChosenArchive], bool, str | None]:
    """Return the archives of a query's arguments, whether each has a schema, and the SQL. Raises JetcaptureError.

    `CONFIG [SQL]` and `URL STREAM [SQL]` are one archive without a schema. A URL or directory without a stream stands
    for all of its streams, and so do several of these and of configurations; `find` finds those of a file for many.
    """
    from jetcapture_py.config.captures import CaptureFiles
    from jetcapture_py.config.values import parse_option
    from jetcapture_py.store.archive import open_archive

    named = [words[0], *takewhile(_is_archive, words[1:])]
    rest = words[len(named) :]
    files = [Path(word) for word in named if not _is_url(word)]
    of_stream = not files and bool(rest) and not any(map(str.isspace, rest[0])) and not _is_option(rest[0])
    if len(named) == 1 and (of_stream or (files and (stream or not CaptureFiles(files).of_many))):
        archive = chosen_archive(words, options, stream, sql="[SQL]")
        return [archive], False, archive.statement
    unexpected = [word for word in rest if _is_option(word)] or rest[1:]
    if unexpected:
        raise ConfigError(
            f"unexpected argument {unexpected[0]}: expected CONFIG… [SQL], DIRECTORY [SQL] or URL STREAM [SQL]"
        )
    given = dict(option("--option", parse_option, options))
    archives: list[ChosenArchive] = []
    for word in named:
        if _is_url(word):
            names = open_archive(word, given).streams()
            archives += [
                ChosenArchive(url=word, stream=name, options=given) for name in names if stream in (None, name)
            ]
            continue
        captures = CaptureFiles([Path(word)], find=find, streams=[stream] if stream else (), together=False).select()
        if captures.problems:
            raise ConfigError(*(line for lines in captures.problems.values() for line in lines))
        for config in captures.configs.values():
            settings = dict(config.store.options) | given
            archives.append(ChosenArchive(url=config.store.url, stream=config.source.stream, options=settings))
    if not archives:
        raise ConfigError(f"no archive of a stream in {', '.join(named)}")
    return _distinct(archives), True, next(iter(rest), None)


def _distinct(archives: Iterable[ChosenArchive]) -> list[ChosenArchive]:
    """Return the archives without repetitions. Raises ConfigError if two would have the same schema."""
    known: dict[str, ChosenArchive] = {}
    for archive in archives:
        other = known.setdefault(archive.stream.lower(), archive)
        if (_root(other.url), other.stream) != (_root(archive.url), archive.stream):
            from jetcapture_py.text import without_credentials

            places = [f"stream {one.stream} in {without_credentials(one.url)}" for one in (other, archive)]
            raise ConfigError(f"{' and '.join(places)} are the same schema: query one of them")
    return list(known.values())


def _root(url: str) -> str:
    path = url.removeprefix("file://")
    return path.rstrip("/") if "://" in path else str(Path(path).absolute())


def _is_url(word: str) -> bool:
    return "://" in word or Path(word).is_dir()


def _is_archive(word: str) -> bool:
    """Whether an argument after the first is a configuration, a URL or a directory, rather than a stream or SQL."""
    from jetcapture_py.config.values import is_stream_name

    if not word or is_stream_name(word) or any(map(str.isspace, word)) or _is_option(word):
        return False
    return word.endswith((".yaml", ".yml")) or _URL.match(word) is not None or Path(word).is_dir()


def _usage(archive: str, sql: str) -> str:
    return f"{archive} {sql}".rstrip()


def _is_option(word: str) -> bool:
    """Whether a word is a misspelt option rather than SQL that begins with a comment."""
    return word.startswith("-") and word.partition("=")[0].lstrip("-").replace("-", "_").isidentifier()


# ---------------------------------------------------------------------- values


def refuse(*cases: tuple[object, str]) -> None:
    """Raise ConfigError with the text of the first case that is true."""
    for case, problem in cases:
        if case:
            raise ConfigError(problem)


def time_option(name: str, text: str | None) -> datetime | None:
    """Parse the time of the option `name`. Raises ConfigError."""
    from jetcapture_py.config.units import parse_time

    return value_of(name, parse_time, text)


@overload
def value_of(name: str, parse: Callable[[str], T], text: str) -> T: ...
@overload
def value_of(name: str, parse: Callable[[str], T], text: str | None) -> T | None: ...
def value_of(name: str, parse: Callable[[str], T], text: str | None) -> T | None:
    """Parse the text of the option `name` with `parse`, which raises ValueError. Raises ConfigError."""
    return None if text is None else option(name, parse, [text])[0]


def option(name: str, parse: Callable[[str], T], texts: Iterable[str] | None) -> list[T]:
    """Parse each text of the repeatable option `name`. Raises ConfigError."""
    from jetcapture_py.config.units import got

    values: list[T] = []
    for text in texts or ():
        try:
            values.append(parse(text))
        except ValueError as error:
            raise ConfigError(f"{name}: {got(str(error), text)}") from error
    return values
