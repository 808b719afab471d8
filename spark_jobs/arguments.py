"""Command line arguments of the jobs, as dataclasses: each field is an option, shared options are base classes."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Container, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer import Argument, BadParameter, Option

from jetcapture_py.config import model
from jetcapture_py.config.model import NatsConfig, SourceConfig
from jetcapture_py.config.units import parse_time
from jetcapture_py.config.values import parse_option
from jetcapture_py.options import Context, NatsFile, Servers, login

T = TypeVar("T")

_SPACE = re.compile(r"\s")


class Parsed(NamedTuple):
    """Converts an option's text, or each element of a list, to its value; `read` raises ValueError."""

    read: Callable[[str], object]


def parse(name: str, kind: type[T], arguments: Sequence[str] | None) -> T:
    """Parse the arguments of the command `name`; its help text is the docstring of `kind`.

    Exits for --help, and with code 2 on a usage error. Raises ConfigError for an invalid --config file.
    """
    found: list[T] = []
    hints = get_type_hints(kind, include_extras=True)
    own = [*getattr(kind, "positional", ()), *kind.__annotations__]  # listed before shared options
    declared = [each for each in fields(kind) if each.init]  # type: ignore[arg-type]
    declared.sort(key=lambda each: own.index(each.name) if each.name in own else len(own))
    parameters = [_parameter(each, hints[each.name]) for each in declared]

    def command(**given: Any) -> None:
        found.append(kind(**{name: value for name, value in given.items() if value is not None}))

    command.__doc__ = kind.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(name, context_settings={"help_option_names": ["-h", "--help"]})(command)
    switches = {_flag(each.name) for each in declared if get_args(hints[each.name])[0] is bool}
    try:
        app(_after_options(sys.argv[1:] if arguments is None else arguments, switches), prog_name=name)
    except SystemExit:
        if not found:
            raise
    return found[0]


def _after_options(words: Sequence[str], switches: Container[str]) -> list[str]:
    """Move SQL that starts with a comment after `--`, so that it is not parsed as an option."""
    if "--" in words:
        return list(words)
    options: list[str] = []
    moved: list[str] = []
    for before, word in zip(("", *words), words, strict=False):
        comment = word.startswith("--") and _SPACE.search(word.partition("=")[0]) is not None
        value = before.startswith("--") and "=" not in before and before not in switches
        (moved if comment and not value else options).append(word)
    return [*options, "--", *moved] if moved else options


def _parameter(declared: Field[Any], hint: Any) -> inspect.Parameter:
    kind, option, *parsed = get_args(hint)
    several = get_origin(kind) is list
    for each in parsed:
        kind, option.callback = (list[str] if several else str | None), _callback(each.read, several)
    default = None if declared.default in (MISSING, "") or parsed else declared.default
    return inspect.Parameter(
        declared.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _callback(read: Callable[[str], object], several: bool) -> Callable[[Any], Any]:
    def converted(value: Any) -> Any:
        try:
            return [read(each) for each in value or ()] if several else None if value is None else read(value)
        except ValueError as error:
            raise BadParameter(str(error)) from error

    return converted


_WHEN = "RFC 3339, UTC by default; the start of today or yesterday; or how long ago, such as 1h"


@dataclass(kw_only=True)
class StoreArguments:
    """The archive to work on: `URL STREAM`, or `--config FILE`, which provides both.

    `options` go to fsspec; `nats` is the configuration's section, None without --config.
    """

    url: Annotated[str, Argument(metavar="URL", help="The archive's store.url. Omit with --config.")] = ""
    stream: Annotated[str, Argument(metavar="STREAM", help="The stream's name. Omit with --config.")] = ""
    config: Annotated[
        Path | None,
        Option("--config", metavar="FILE", help="The capture's configuration; provides store, stream and servers."),
    ] = None
    given: Annotated[
        list[tuple[str, object]],
        Option(
            "--option",
            metavar="NAME=VALUE",
            help="One of store.options: anon=true, 'key=${S3_KEY}', 'client_kwargs={region_name: eu-west-1}'; "
            "repeatable.",
        ),
        Parsed(parse_option),
    ] = field(default_factory=list)
    options: dict[str, Any] = field(init=False, default_factory=dict)
    nats: NatsConfig | None = field(init=False, default=None)
    source: SourceConfig | None = field(init=False, default=None)
    positional: ClassVar[tuple[str, ...]] = ("url", "stream")

    def __post_init__(self) -> None:
        """Assign the positional arguments; --config replaces the first two."""
        words = [word for name in self.positional if (word := getattr(self, name))]
        if self.config is not None:
            settings = model.load(self.config)
            self.options, self.nats, self.source = dict(settings.store.options), settings.nats, settings.source
            words = [settings.store.url, settings.source.stream, *words]
        if len(words) < len(self.positional):
            raise BadParameter(f"{self.positional[len(words)].upper()} is missing")
        if len(words) > len(self.positional):
            raise BadParameter(f"unexpected argument {words[-1]}: --config provides URL and STREAM")
        for name, word in zip(self.positional, words, strict=True):
            setattr(self, name, word)
        self.options |= dict(self.given)


@dataclass(kw_only=True)
class PartArguments(StoreArguments):
    """The part of the archive to work on."""

    start: Annotated[
        datetime | None, Option("--from", "--since", metavar="TIME", help=f"Inclusive; {_WHEN}."), Parsed(parse_time)
    ] = None
    end: Annotated[datetime | None, Option("--to", metavar="TIME", help=f"Exclusive; {_WHEN}."), Parsed(parse_time)] = (
        None
    )
    given_keys: Annotated[
        list[str], Option("--key", metavar="KEY", help='Repeatable; "" for messages without a key.')
    ] = field(default_factory=list)

    @property
    def keys(self) -> list[str | None] | None:
        """The selected keys (None: messages without a key), or None for all."""
        return [key or None for key in self.given_keys] or None


@dataclass(kw_only=True)
class ArchiveArguments(PartArguments):
    """How to read the archive."""

    complete_only: Annotated[
        bool,
        Option("--complete-only", help="Only messages up to the watermark's time, where no more can arrive."),
    ] = False
    dedupe: Annotated[
        Literal["auto", "full", "none"],
        Option(
            help="Which copies of a message to drop. auto: those under its key and bucket, enough unless `key` or "
            "block.interval changed; full: compare all messages (slow); none."
        ),
    ] = "auto"


@dataclass(kw_only=True)
class QueryArguments(ArchiveArguments):
    """How to read the archive with Spark SQL."""

    parquet_only: Annotated[
        bool, Option("--parquet-only", help="Skip objects in formats other than Parquet, which are an error otherwise.")
    ] = False
    event_start: Annotated[
        datetime | None,
        Option("--event-from", metavar="TIME", help="Like --from, but filters by the time in block.time."),
        Parsed(parse_time),
    ] = None
    event_end: Annotated[
        datetime | None,
        Option("--event-to", metavar="TIME", help="Like --to, but filters by the time in block.time."),
        Parsed(parse_time),
    ] = None
    engine: Annotated[
        Literal["spark", "arrow"],
        Option(help="arrow: read with fsspec and Arrow if Spark has no file system for the URL."),
    ] = "spark"
    sql: str = ""


@dataclass(kw_only=True)
class SurveyArguments:
    """Whether to read all rows before publishing."""

    no_survey: Annotated[
        bool,
        Option(
            "--no-survey",
            help="Skip the check of all rows; fail at the first invalid subject.",
        ),
    ] = False

    @property
    def survey(self) -> bool:
        """Whether to read all rows before publishing the first."""
        return not self.no_survey


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@dataclass(kw_only=True)
class LoginArguments:
    """Target servers and login; `nats` is the login of --config."""

    nats: NatsConfig | None = field(init=False, default=None)
    nats_file: NatsFile = None
    context: Context = None
    servers: Servers = None

    @property
    def target_login(self) -> NatsConfig:
        """The target's login. Raises ConfigError."""
        return login(self.nats_file, self.context, self.servers, default=self.nats)
