"""The commands. Errors become one clear line and an exit code: 0 done, 1 runtime failure, 2 wrong configuration."""

# No `from __future__ import annotations`: typer would evaluate the text of every annotation, 5 ms per start.

import gc
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from jetcapture_py import commands
from jetcapture_py import options as opt
from jetcapture_py.errors import ConfigError, JetcaptureError

if TYPE_CHECKING:
    from jetcapture_py.config.captures import AccountConfig, SelectedStreams
    from jetcapture_py.config.model import Config
    from jetcapture_py.verify.findings import Progress

GROUPS = {
    "Set up": ("demo", "schema", "check", "tap", "columns", "test", "apply", "export"),
    "Run": ("run", "status"),
    "Read": ("query", "report", "objects", "files", "get", "spark"),
    "Keep": ("verify", "maintain", "compact", "quarantine", "erase", "restore"),
}
"""The commands in the order of use, as --help lists them."""


class _Grouped(TyperGroup):
    """Lists its commands in `GROUPS`, with the first sentence of their help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(10), self.commands[name].get_short_help_str(100)) for name in names])


app = typer.Typer(
    name="jetcapture",
    cls=_Grouped,
    help="Archive NATS JetStream streams as Parquet in object storage; acknowledge only what is stored.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


_Http = Annotated[
    str | None,
    typer.Option("--http", metavar="ADDRESS", help="Where to serve metrics and probes, instead of http.listen."),
]


def main() -> None:
    """Run the command line."""
    try:
        app()
    except ConfigError as error:
        for problem in error.problems:
            typer.echo(f"jetcapture: {problem}", err=True)
        sys.exit(2)
    except JetcaptureError as error:
        from jetcapture_py.text import MAX_LOGGED, one_line

        typer.echo(f"jetcapture: {one_line(str(error), MAX_LOGGED)}", err=True)
        sys.exit(1)


def _version(show: bool) -> None:
    if show:
        from importlib.metadata import version

        typer.echo(f"jetcapture {version('jetcapture')}")
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Archive NATS JetStream streams as Parquet in object storage; acknowledge only what is stored."""


@app.command()
def run(
    config: opt.Configs,
    until_caught_up: Annotated[
        bool,
        typer.Option("--until-caught-up", help="Drain and stop once nothing is pending or unacknowledged."),
    ] = False,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="A capture that fails does not stop the others.")
    ] = False,
    http: _Http = None,
) -> None:
    """Capture until SIGTERM or SIGINT, then drain. A second signal exits immediately; SIGHUP reloads the files."""
    server = None
    try:
        from jetcapture_py.monitoring import http_server

        server = http_server.start_early(*config, listen=http)  # the imports take seconds on a busy machine
        from jetcapture_py.capture import allocator

        allocator.use_system_allocator()
        from jetcapture_py import supervisor
        from jetcapture_py.config.captures import CaptureFiles
        from jetcapture_py.jetstream.streams import on_server

        files = CaptureFiles(config, http, find=on_server)
        gc.freeze()  # imported objects are never freed, so collections skip them
        raise typer.Exit(supervisor.run(files, until_caught_up=until_caught_up, keep_going=keep_going, server=server))
    finally:
        if server is not None:
            server.stop()


@app.command()
def status(
    config: opt.Configs,
    streams: opt.Streams = None,
    watch: Annotated[bool, typer.Option("--watch", help="Repeat every two seconds until interrupted.")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """Show lag, pending messages, watermark and last stored object."""
    from jetcapture_py.manage.many import captures
    from jetcapture_py.monitoring import status as command

    raise typer.Exit(command.run(captures(config, streams), watch=watch, as_json=as_json))


@app.command()
def verify(
    config: opt.Configs,
    streams: opt.Streams = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every byte of every object, to find flipped bits.")
    ] = False,
    content: Annotated[
        bool, typer.Option("--content", help="Read every message of the stream, and compare it with the archive.")
    ] = False,
    as_json: opt.AsJson = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Also fail on gaps, forks, foreign files, filter changes, damaged watermarks, and "
            "content that --content could not compare.",
        ),
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Store missing messages that the stream has; move damaged copies aside.")
    ] = False,
    table: Annotated[
        bool, typer.Option("--table", help="Compare the Iceberg tables of `maintain.table` with the archive.")
    ] = False,
) -> None:
    """Prove that every acknowledged message is archived, once. Exit code 1 if not."""
    import asyncio
    import json
    from dataclasses import replace

    from jetcapture_py import log
    from jetcapture_py.manage import many

    if repair:
        from jetcapture_py.verify.repair import verify_and_repair  # imports the capture
    else:
        from jetcapture_py.verify import proof
    if table:
        from jetcapture_py.store.archive import open_archive
        from jetcapture_py.table.compare import compare_tables

    def work(settings: "Config", progress: "Progress") -> many.CommandResult:
        log.setup(settings.log.format, "error")
        done = None
        if repair:
            report, done = asyncio.run(verify_and_repair(settings, deep=deep, content=content, progress=progress))
        else:
            report = asyncio.run(proof.verify(settings, deep=deep, content=content, progress=progress))
        if table:
            archive = open_archive(settings.store.url, settings.store.options)
            report = replace(report, findings=(*report.findings, *compare_tables(settings, archive)))
        further = {} if done is None else {"repair": done.fields()}
        lines = [*report.as_text().splitlines(), *(() if done is None else done.lines(report))]
        return many.CommandResult(
            summary=lines[0],
            lines=lines,
            records=[json.loads(report.as_json(strict=strict, **further))],
            code=report.exit_code(strict=strict),
        )

    files = many.captures(config, streams)
    raise typer.Exit(many.run(files, work, as_json=as_json, at_once=not repair, if_none=1))


@app.command()
def apply(
    config: opt.Configs,
    streams: opt.Streams = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; exit code 3 if something would change.")
    ] = False,
    may_delete: Annotated[
        bool, typer.Option("--may-delete", help="Also make changes that may delete messages; else left out, code 3.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with the JetStream API's values.")] = False,
) -> None:
    """Create or update the stream and the consumer. Show each change as -old +new; leave out what may delete."""
    from jetcapture_py.config.model import parse_for_apply
    from jetcapture_py.manage import many
    from jetcapture_py.manage.apply import run

    files = many.captures(config, streams, parse=parse_for_apply)
    raise typer.Exit(
        many.run(files, lambda config, _: run(config, dry_run=dry_run, may_delete=may_delete), as_json=as_json)
    )


@app.command()
def check(
    config: opt.Configs,
    streams: opt.Streams = None,
    as_json: opt.AsJson = False,
    outage: Annotated[
        str | None,
        typer.Option("--outage", metavar="DURATION", help="Longest time that the capture may be down; default: 1d."),
    ] = None,
) -> None:
    """Predict whether a configuration will work. Checks server, permissions, store and size of objects."""
    from jetcapture_py.config.units import parse_duration
    from jetcapture_py.manage import check as command
    from jetcapture_py.manage import many

    seconds = opt.value_of("--outage", parse_duration, outage)
    files = many.captures(config, streams, together=True)
    raise typer.Exit(
        many.run(
            files,
            lambda config, _: command.run(config, [*files.configs.values()], outage=seconds),
            as_json=as_json,
            at_once=True,
            tell_left_out=True,
        )
    )


@app.command()
def export(
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="The stream's name.")],
    consumer: Annotated[str | None, typer.Argument(metavar="CONSUMER", help="A consumer of the stream.")] = None,
    nats: opt.NatsFile = None,
    context: opt.Context = None,
    servers: opt.Servers = None,
) -> None:
    """Print a stream and a consumer as a configuration. Applying it changes nothing."""
    from jetcapture_py.config.model import NatsConfig
    from jetcapture_py.manage.export import run

    raise typer.Exit(run(opt.login(nats, context, servers, default=NatsConfig()), stream, consumer))


@app.command()
def objects(
    config: opt.Configs,
    streams: opt.Streams = None,
    keys: opt.Keys = None,
    start: opt.Start = None,
    end: opt.End = None,
    as_json: opt.AsJson = False,
) -> None:
    """List the archive's objects by key and time."""
    from jetcapture_py.manage import many
    from jetcapture_py.manage.objects import run
    from jetcapture_py.reading.selection import Selection

    first, last = opt.time_option("--from", start), opt.time_option("--to", end)
    selection = Selection.of(keys=keys or None, event_start=first, event_end=last)
    files = many.captures(config, streams, find=many.in_archive)
    raise typer.Exit(many.run(files, lambda config, _: run(config, selection), as_json=as_json, at_once=True))


@app.command()
def maintain(
    config: opt.Configs,
    streams: opt.Streams = None,
    every: Annotated[
        str | None,
        typer.Option("--every", metavar="DURATION", help="Run as a service, with a pass this often, until SIGTERM."),
    ] = None,
    http: _Http = None,
    dry_run: opt.DryRun = False,
    as_json: opt.AsJson = False,
) -> None:
    """Compact archives, update their tables, and expire time slices. Follows the section `maintain`; needs no NATS."""
    from jetcapture_py.capture import allocator
    from jetcapture_py.config.units import parse_duration
    from jetcapture_py.monitoring import http_server

    seconds = opt.value_of("--every", parse_duration, every)
    opt.refuse(
        (every is not None and (dry_run or as_json), "--every: cannot be combined with --dry-run or --json"),
        (seconds == 0, "--every: expected a duration above 0"),
    )
    server = http_server.start_early(*config, listen=http) if seconds is not None else None
    try:
        allocator.use_system_allocator()
        from jetcapture_py.maintain import command, schedule
        from jetcapture_py.manage import many

        files = many.captures(config, streams, http, find=many.in_archive, together=True)
        if seconds is None:
            raise typer.Exit(command.maintain(files, dry_run=dry_run, as_json=as_json))
        raise typer.Exit(schedule.serve(files, seconds, server))
    finally:
        if server is not None:
            server.stop()


@app.command()
def compact(
    config: opt.Configs,
    streams: opt.Streams = None,
    start: opt.Start = None,
    end: opt.End = None,
    keys: opt.Keys = None,
    target: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Instead of maintain.compact.target; default: 256MiB.")
    ] = None,
    after: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Instead of maintain.compact.after; default: 10m.")
    ] = None,
    grace: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Instead of maintain.compact.grace; default: 1h.")
    ] = None,
    incomplete: Annotated[
        bool, typer.Option("--incomplete", help="Also compact time slices that the watermark has not passed yet.")
    ] = False,
    dry_run: opt.DryRun = False,
    as_json: opt.AsJson = False,
) -> None:
    """Merge small and overlapping objects, without Spark. Leaves incomplete time slices alone."""
    from jetcapture_py.capture import allocator

    allocator.use_system_allocator()
    from jetcapture_py.config.maintain import CompactConfig
    from jetcapture_py.config.section import validated
    from jetcapture_py.maintain import command
    from jetcapture_py.manage import many

    given = {"target": target, "after": after, "grace": grace}
    validated(CompactConfig, given, rename=lambda problem: f"--{problem}")
    request = command.CompactRequest(
        settings={name: text for name, text in given.items() if text is not None},
        selection=opt.selection_of(start, end, keys),
        incomplete=incomplete,
    )
    files = many.captures(config, streams, find=many.in_archive, together=True)
    raise typer.Exit(command.maintain(files, request, dry_run=dry_run, as_json=as_json))


@app.command()
def tap(
    config: opt.OneConfig,
    stream: opt.OneStream = None,
    count: Annotated[int, typer.Option("-n", min=1, max=100_000, help="How many messages.")] = 20,
    as_json: opt.AsJson = False,
) -> None:
    """Show how a configuration decodes the newest messages. Stores and acknowledges nothing."""
    from jetcapture_py.config.captures import only
    from jetcapture_py.manage import many
    from jetcapture_py.manage import tap as command

    many.show_one(command.run(only(config, stream), count), as_json=as_json)


@app.command()
def columns(
    config: opt.OneConfig, stream: opt.OneStream = None, start: opt.Start = None, as_json: opt.AsJson = False
) -> None:
    """Write the decode.columns that the newest messages suggest, or archived ones (--from). Stores nothing."""
    from jetcapture_py.config.captures import only
    from jetcapture_py.manage import columns as command
    from jetcapture_py.manage import many

    many.show_one(command.run(only(config, stream), opt.time_option("--from", start)), as_json=as_json)


@app.command()
def test(
    config: opt.OneConfig,
    cases: Annotated[
        Path, typer.Argument(metavar="CASES", help="The test cases, YAML: messages and their expected outcome.")
    ],
    stream: opt.OneStream = None,  # noqa: PT028  it is no test
) -> None:
    """Run unit tests of a configuration. Message in; key, time slice and columns out. Needs no server."""
    from jetcapture_py.config.captures import only
    from jetcapture_py.manage import cases as command
    from jetcapture_py.manage import many

    raise typer.Exit(many.show_one(command.run(only(config, stream), cases)))


@app.command()
def schema() -> None:
    """Print the JSON Schema of the configuration file, for editors."""
    import json

    from jetcapture_py.config.model import schema as config_schema

    typer.echo(json.dumps(config_schema(), indent=2))


@app.command(
    context_settings=opt.SQL_MAY_BEGIN_WITH_A_COMMENT,
)
def query(
    first: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG", help="The configuration file; or store.url and the stream; or an archive of many streams."
        ),
    ],
    rest: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SQL",
            help="Such as 'SELECT key, count(*) FROM archive GROUP BY key'. Without it: a shell on a terminal, else "
            "standard input. Before it: more configurations, for joins.",
        ),
    ] = None,
    start: opt.Start = None,
    end: opt.End = None,
    stream: opt.OneStream = None,
    event_start: opt.EventStart = None,
    event_end: opt.EventEnd = None,
    keys: opt.Keys = None,
    complete_only: opt.CompleteOnly = False,
    dedupe: opt.DedupeOption = "auto",
    parquet_only: opt.ParquetOnly = False,
    types: Annotated[
        list[str] | None,
        typer.Option(
            "--type",
            metavar="COLUMN=TYPE",
            help="Read a column of archive as this type, such as id=BIGINT; other values are NULL, and counted. "
            "Repeatable; with several streams orders.id=BIGINT.",
        ),
    ] = None,
    by: opt.By = None,
    order: opt.Order = "_nats_seq",
    deleted: opt.Deleted = None,
    options: opt.StoreOptions = None,
    form: Annotated[
        Literal["table", "csv", "json", "parquet"], typer.Option("--format", help="Output format.")
    ] = "table",
    output: Annotated[
        str | None, typer.Option(metavar="FILE", help="Output file; with --format parquet also a URL.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Show all rows and columns of a table on a terminal, not 40 rows that fit.")
    ] = False,
) -> None:
    """Run SQL over archives with DuckDB, each message once.

    query CONFIG [SQL], or query URL STREAM [SQL].
    The views are archive, quarantine (messages that could not be decoded) and objects; with --by also latest, the
    newest row of each key.

    query DIRECTORY [SQL], or query CONFIG CONFIG… [SQL]: several streams, each a schema, such as orders.archive. SHOW
    TABLES lists their views.
    """
    from jetcapture_py.manage import query as command

    def in_archive(file: "AccountConfig") -> "SelectedStreams":
        from jetcapture_py.manage import many  # it imports the client of NATS, which few queries need

        return many.in_archive(file)

    opt.refuse(
        (form == "parquet" and output in (None, "-"), "--format parquet needs --output: a file or a URL"),
        (
            form != "parquet" and "://" in (output or ""),
            f"--output: only Parquet is written to a URL; --format {form} needs a file",
        ),
    )
    archives, schemas, statement = opt.chosen_archives([first, *(rest or ())], options, stream, find=in_archive)
    request = command.QueryRequest(
        archives=archives,
        schemas=schemas,
        statement=statement,
        selection=opt.selection_of(start, end, keys, event_start, event_end),
        complete_only=complete_only,
        dedupe=dedupe,
        parquet_only=parquet_only,
        types=opt.types_of(types),
        latest=opt.latest_of(by, order, deleted),
        form=form,
        output=output,
        everything=everything,
    )
    raise typer.Exit(command.run(request))


@app.command()
def report(
    archive: opt.Archive,
    stream: opt.OneStream = None,
    start: opt.Start = None,
    end: opt.End = None,
    keys: opt.Keys = None,
    complete_only: opt.CompleteOnly = False,
    options: opt.StoreOptions = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Output file.")] = Path("report.html"),
) -> None:
    """Write one HTML page about an archive: volume, holes, quarantine, lateness, objects. Asks no server."""
    from jetcapture_py.report.command import run
    from jetcapture_py.report.facts import Scope

    scope = Scope(selection=opt.selection_of(start, end, keys), complete=complete_only)
    raise typer.Exit(run(opt.chosen_archive(archive, options, stream), scope, output))


@app.command()
def demo(
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Directory for the archive; by default a new one.")
    ] = None,
    messages: Annotated[int, typer.Option(min=1000, help="How many orders to publish.")] = 200_000,
    with_spark: Annotated[
        bool | None,
        typer.Option("--spark/--no-spark", help="Query with Spark, or with DuckDB; default: Spark if it is installed."),
    ] = None,
) -> None:
    """Show everything once, on a NATS server of its own. Publish, capture and query orders; publish the result."""
    raise typer.Exit(import_module("jetcapture_py.manage.demo").run(directory, messages, spark=with_spark))


app.add_typer(commands.app)


class _Jobs(TyperGroup):
    """Knows the names of Spark's jobs; imports the one that runs, or whose options are asked for."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and _job(command.name or ""), rest


def _job(name: str) -> Any:
    from importlib import util

    missing = next((package for package in ("pyspark", "pandas") if util.find_spec(package) is None), None)
    if missing is not None:
        raise JetcaptureError(f"{missing} is missing: pip install 'jetcapture[spark]'")
    return import_module(f"spark_jobs.{name}").COMMAND


spark = typer.Typer(
    name="spark",
    cls=_Jobs,
    help="Run a Spark job over an archive. JOB --help shows its arguments.",
    no_args_is_help=True,
)
app.add_typer(spark)

JOBS = {
    "query": "Run SQL over an archive; print, write or publish the rows.",
    "compact": "Merge the small and overlapping objects of complete time slices.",
    "replay": "Publish archived messages, or the rows of a query, to JetStream.",
}
for _name, _help in JOBS.items():
    spark.command(_name, help=_help)(lambda: None)
