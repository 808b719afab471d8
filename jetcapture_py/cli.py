"""The commands. Errors become one clear line and an exit code: 0 done, 1 runtime failure, 2 wrong configuration."""

# No `from __future__ import annotations`: typer would evaluate the text of every annotation, 5 ms per start.

import sys
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from jetcapture_py.errors import ConfigError, JetcaptureError

app = typer.Typer(
    name="jetcapture",
    help="Archive NATS JetStream streams as Parquet in object storage; acknowledge only what is stored.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


_WHEN = "2026-05-01T12:00:00Z, a date, today or yesterday"


def main() -> None:
    """Run the command line."""
    try:
        app()
    except ConfigError as error:
        for problem in error.problems:
            typer.echo(f"jetcapture: {problem}", err=True)
        sys.exit(2)
    except JetcaptureError as error:
        from jetcapture_py.text import LONGEST_LOGGED, one_line

        typer.echo(f"jetcapture: {one_line(str(error), LONGEST_LOGGED)}", err=True)
        sys.exit(1)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"jetcapture {version('jetcapture')}")
        raise typer.Exit


def _time(option: str, text: str | None) -> datetime | None:
    """Parse the time that an option names. Raises ConfigError."""
    from jetcapture_py.config.units import parse_time

    try:
        return None if text is None else parse_time(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Archive NATS JetStream streams as Parquet in object storage; acknowledge only what is stored."""


@app.command()
def run(
    config: Annotated[
        list[Path],
        typer.Argument(
            metavar="CONFIG", help="Configuration files, YAML, or directories of them; each is one capture."
        ),
    ],
    until_caught_up: Annotated[
        bool,
        typer.Option("--until-caught-up", help="Drain and stop once nothing is pending or unacknowledged."),
    ] = False,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="A capture that fails does not stop the others.")
    ] = False,
    http: Annotated[
        str | None,
        typer.Option("--http", metavar="ADDRESS", help="Where to serve metrics and probes, instead of http.listen."),
    ] = None,
) -> None:
    """Capture until SIGTERM or SIGINT, then drain; a second signal exits immediately. SIGHUP reloads the files."""
    from jetcapture_py import startup

    server, had_terminal = None, startup.hold_hangups()
    try:
        with startup.imports():
            from jetcapture_py.monitoring import http_server

            server = http_server.start_early(*config, listen=http)  # the imports take seconds on a busy machine
            from jetcapture_py.capture import allocator

            allocator.use_system_allocator()
            from jetcapture_py import daemon
            from jetcapture_py.config.several import ConfigFiles

            files = ConfigFiles(config, http)
        code = daemon.run(
            files, until_caught_up=until_caught_up, keep_going=keep_going, server=server, had_terminal=had_terminal
        )
        raise typer.Exit(code)
    finally:
        if server is not None:
            server.stop()


@app.command()
def status(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The configuration file, YAML.")],
    watch: Annotated[bool, typer.Option("--watch", help="Repeat every two seconds until interrupted.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """Show the status of a capture: lag, pending and unacknowledged messages, watermark, last stored object."""
    from jetcapture_py import startup
    from jetcapture_py.config.model import load

    settings = load(config)
    with startup.imports():
        from jetcapture_py.monitoring import status_command
    raise typer.Exit(status_command.run(settings, watch=watch, as_json=as_json))


@app.command()
def verify(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The configuration file, YAML.")],
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every byte of every object, to find flipped bits.")
    ] = False,
    content: Annotated[
        bool, typer.Option("--content", help="Read every message of the stream, and compare it with the archive.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Also fail on gaps, foreign files, objects without checksums, forks, and watermark problems.",
        ),
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Store missing messages that are still in the stream.")
    ] = False,
) -> None:
    """Prove that everything acknowledged is in the archive and nothing is read twice; exit code 1 if not."""
    from jetcapture_py import log, startup
    from jetcapture_py.config.model import load

    settings = load(config)
    with startup.imports():
        from jetcapture_py.verify import command
    log.setup(settings.log.format, "error")
    raise typer.Exit(command.run(settings, deep=deep, content=content, as_json=as_json, strict=strict, repair=repair))


@app.command()
def apply(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The configuration file, YAML.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; exit code 3 if something would change.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with the JetStream API's values.")] = False,
) -> None:
    """Create or update the stream and the consumer; show each change as -old +new; delete nothing."""
    from jetcapture_py.config.model import load_managed
    from jetcapture_py.manage.apply import run

    raise typer.Exit(run(load_managed(config), dry_run=dry_run, as_json=as_json))


@app.command()
def check(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The configuration file, YAML.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with the figures.")] = False,
    outage: Annotated[
        str | None,
        typer.Option("--outage", metavar="DURATION", help="Longest time that the capture may be down; default: 1d."),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option("--put-price", metavar="DOLLARS", min=0, help="Price of 1,000 writes; default: the list price."),
    ] = None,
) -> None:
    """Predict whether the configuration will work: server, permissions, store, length of blocks, costs."""
    from jetcapture_py import startup
    from jetcapture_py.config.model import load
    from jetcapture_py.config.units import parse_duration

    settings = load(config)
    try:
        seconds = None if outage is None else parse_duration(outage)
    except ValueError as error:
        raise ConfigError(f"--outage: {error}") from error
    with startup.imports():
        from jetcapture_py.manage import check as command
    raise typer.Exit(command.run(settings, as_json=as_json, outage=seconds, price=price))


@app.command()
def export(
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="The stream's name.")],
    consumer: Annotated[str | None, typer.Argument(metavar="CONSUMER", help="A consumer of the stream.")] = None,
    servers: Annotated[
        list[str] | None, typer.Option("--servers", metavar="URL", help="NATS server; repeatable.")
    ] = None,
    context: Annotated[
        str | None, typer.Option("--context", metavar="CONTEXT", help='A NATS CLI context; "": the selected one.')
    ] = None,
) -> None:
    """Print a stream and a consumer as a configuration; applying it changes nothing."""
    from jetcapture_py.config.model import nats_section
    from jetcapture_py.manage.export import run

    raise typer.Exit(run(nats_section(servers, context), stream, consumer))


@app.command()
def objects(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The configuration file, YAML.")],
    keys: Annotated[
        list[str] | None, typer.Option("--key", metavar="KEY", help='Repeatable; "" for messages without a key.')
    ] = None,
    start: Annotated[str | None, typer.Option("--from", metavar="TIME", help=f"Inclusive; {_WHEN}.")] = None,
    end: Annotated[str | None, typer.Option("--to", metavar="TIME", help=f"Exclusive; {_WHEN}.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per object.")] = False,
) -> None:
    """List the archive's objects by key and time."""
    from jetcapture_py.config.model import load

    settings = load(config)
    from jetcapture_py.manage.objects import Selection, run

    selection = Selection(keys=keys or (), start=_time("--from", start), end=_time("--to", end))
    raise typer.Exit(run(settings, selection, as_json=as_json))


_AsOf = Annotated[
    str | None,
    typer.Option("--as-of", metavar="TIME|REVISION", help=f"As it was then: {_WHEN}, or a revision; default: newest."),
]


@app.command()
def files(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The configuration file, YAML.")],
    as_of: _AsOf = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per file.")] = False,
) -> None:
    """List the files of an archived object store."""
    from jetcapture_py.config.model import load
    from jetcapture_py.manage.files import moment, run_list

    raise typer.Exit(run_list(load(config), as_of=moment(as_of), as_json=as_json))


@app.command()
def get(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The configuration file, YAML.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The file's name in the object store.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Target; -: standard output. Default: last part of NAME."),
    ] = None,
    as_of: _AsOf = None,
) -> None:
    """Write a file of an archived object store, checked against its SHA-256."""
    from jetcapture_py.config.model import load
    from jetcapture_py.manage.files import moment, run_get

    raise typer.Exit(run_get(load(config), name, output, as_of=moment(as_of)))


@app.command()
def tap(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The configuration file, YAML.")],
    count: Annotated[int, typer.Option("-n", min=1, max=100_000, help="How many messages.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per message.")] = False,
) -> None:
    """Show how the configuration decodes the newest messages; store and acknowledge nothing."""
    from jetcapture_py import startup
    from jetcapture_py.config.model import load

    settings = load(config)
    with startup.imports():
        from jetcapture_py.manage import tap as command
    raise typer.Exit(command.run(settings, count=count, as_json=as_json))


@app.command()
def test(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The configuration file, YAML.")],
    cases: Annotated[
        Path, typer.Argument(metavar="CASES", help="The test cases, YAML: messages and their expected outcome.")
    ],
) -> None:
    """Run unit tests of the configuration: message in, key, bucket and columns out. Needs no server."""
    from jetcapture_py import startup
    from jetcapture_py.config.model import load

    settings = load(config)
    with startup.imports():
        from jetcapture_py.manage import cases as command
    raise typer.Exit(command.run(settings, cases))


@app.command()
def schema() -> None:
    """Print the JSON Schema of the configuration file, for editors."""
    import json

    from jetcapture_py.config.model import schema as config_schema

    typer.echo(json.dumps(config_schema(), indent=2))


@app.command()
def demo(
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Directory for the archive; by default a new one.")
    ] = None,
    messages: Annotated[int, typer.Option(min=1000, help="How many orders to publish.")] = 200_000,
) -> None:
    """Start a NATS server; publish, capture, query and replay orders, showing each step."""
    raise typer.Exit(import_module("spark_jobs.demo").run(directory, messages))


spark = typer.Typer(
    name="spark",
    help="Run a Spark job over an archive; JOB --help shows its arguments.",
    no_args_is_help=True,
)
app.add_typer(spark)

JOBS = {
    "query": "SQL over an archive: to the terminal, CSV, JSON, Parquet, or NATS.",
    "compact": "Merge the small and overlapping objects of closed buckets.",
    "replay": "Publish archived messages, or the rows of a query, to JetStream.",
    "restore": "Create a stream from its archive, exactly as it was.",
    "report": "Write one HTML page about an archive.",
}


def _job(name: str, description: str) -> None:
    """Make a command of the module `spark_jobs.{name}`, which reads its own arguments."""

    @spark.command(
        name,
        help=description,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def run_job(context: typer.Context) -> None:
        from importlib import util

        missing = next((package for package in ("pyspark", "pandas") if util.find_spec(package) is None), None)
        if missing is not None:
            raise JetcaptureError(f"{missing} is missing: pip install 'jetcapture[spark]'")
        raise typer.Exit(import_module(f"spark_jobs.{name}").main(context.args))


for _name, _description in JOBS.items():
    _job(_name, _description)
