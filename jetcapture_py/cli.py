"""The commands. Errors become one clear line and an exit code: 0 done, 1 runtime failure, 2 wrong configuration."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from jetcapture_py.errors import ConfigError, JetcaptureError
from jetcapture_py.text import LONGEST_LOGGED, one_line

app = typer.Typer(
    name="jetcapture",
    help="Archive NATS JetStream streams as Parquet in object storage; acknowledge only what is stored.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Run the command line."""
    try:
        app()
    except ConfigError as error:
        for problem in error.problems:
            typer.echo(f"jetcapture: {problem}", err=True)
        sys.exit(2)
    except JetcaptureError as error:
        typer.echo(f"jetcapture: {one_line(str(error), LONGEST_LOGGED)}", err=True)
        sys.exit(1)


def _version(wanted: bool) -> None:
    if wanted:
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
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The configuration file, YAML.")],
    until_caught_up: Annotated[
        bool,
        typer.Option("--until-caught-up", help="Drain and stop once nothing is pending or unacknowledged."),
    ] = False,
) -> None:
    """Capture until SIGTERM, SIGINT or SIGHUP, then drain; a second SIGTERM or SIGINT stops immediately."""
    from jetcapture_py.monitoring import http_server

    server = http_server.start_early(config)  # the imports take seconds on a busy machine
    try:
        from jetcapture_py.capture import memory

        memory.use_system_allocator()
        from jetcapture_py import log, startup
        from jetcapture_py.config.model import load

        settings = load(config)
        with startup.imports(settings):
            from jetcapture_py import daemon
        log.setup(settings.log.format, settings.log.level)
        raise typer.Exit(daemon.run(settings, until_caught_up=until_caught_up, server=server))
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
    with startup.imports(settings):
        from jetcapture_py.monitoring import status_command
    raise typer.Exit(status_command.run(settings, watch=watch, as_json=as_json))


@app.command()
def verify(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The configuration file, YAML.")],
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every byte of every object, to find flipped bits.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Also fail for gaps, foreign files, objects without checksums, and a damaged watermark."
        ),
    ] = False,
) -> None:
    """Prove that everything acknowledged is in the archive and nothing is read twice; exit code 1 if not."""
    from jetcapture_py import log, startup
    from jetcapture_py.capture import memory
    from jetcapture_py.config.model import load

    settings = load(config)
    with startup.imports(settings):
        from jetcapture_py.verify import command
    memory.without_pandas()
    log.setup(settings.log.format, "error")
    raise typer.Exit(command.run(settings, deep=deep, as_json=as_json, strict=strict))


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

        needed = ("pyspark", "pandas", "jinja2") if name == "report" else ("pyspark", "pandas")
        missing = next((package for package in needed if util.find_spec(package) is None), None)
        if missing is not None:
            raise JetcaptureError(f"{missing} is missing: pip install 'jetcapture[spark]'")
        raise typer.Exit(import_module(f"spark_jobs.{name}").main(context.args))


for _name, _description in JOBS.items():
    _job(_name, _description)
