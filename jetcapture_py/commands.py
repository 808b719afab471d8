"""The commands that give back or change what is stored: `files`, `get`, `quarantine`, `erase` and `restore`."""

# No `from __future__ import annotations`: typer would evaluate the text of every annotation, 5 ms per start.

from pathlib import Path
from typing import Annotated

import typer

from jetcapture_py import options as opt

app = typer.Typer()

_AsOf = Annotated[
    str | None,
    typer.Option("--as-of", metavar="TIME|REVISION", help=f"As of then: {opt.WHEN}, or a revision; default: newest."),
]


@app.command()
def files(
    config: opt.OneConfig,
    stream: opt.OneStream = None,
    as_of: _AsOf = None,
    as_json: opt.AsJson = False,
) -> None:
    """List the files of an archived object store."""
    from jetcapture_py.config.captures import only
    from jetcapture_py.manage import many
    from jetcapture_py.manage.files import moment, run_list

    many.show_one(run_list(only(config, stream), opt.value_of("--as-of", moment, as_of)), as_json=as_json)


@app.command()
def get(
    config: opt.OneConfig,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The file's name in the object store.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Target; -: standard output. Default: last part of NAME."),
    ] = None,
    stream: opt.OneStream = None,
    as_of: _AsOf = None,
) -> None:
    """Write a file of an archived object store. Checks its SHA-256."""
    from jetcapture_py.config.captures import only
    from jetcapture_py.manage.files import moment, run_get

    raise typer.Exit(run_get(only(config, stream), name, output, as_of=opt.value_of("--as-of", moment, as_of)))


quarantine = typer.Typer(
    name="quarantine", help="See why messages could not be decoded, and decode them again.", no_args_is_help=True
)
app.add_typer(quarantine)


@quarantine.command("list")
def list_quarantine(
    config: opt.Configs,
    streams: opt.Streams = None,
    as_json: opt.AsJson = False,
) -> None:
    """List why messages are in quarantine. Shows counts, times, subjects and an example."""
    from jetcapture_py.manage import many
    from jetcapture_py.manage import quarantine as command

    files = many.captures(config, streams, find=many.in_archive)
    raise typer.Exit(many.run(files, lambda config, _: command.run_list(config), as_json=as_json, at_once=True))


@quarantine.command("show")
def show_quarantined(
    config: opt.OneConfig,
    seq: Annotated[int, typer.Argument(metavar="SEQ", min=1, help="The message's stream sequence.")],
    stream: opt.OneStream = None,
    as_json: opt.AsJson = False,
) -> None:
    """Show a message, its reason, and how it is decoded now."""
    from jetcapture_py.config.captures import only
    from jetcapture_py.manage import many
    from jetcapture_py.manage import quarantine as command

    many.show_one(command.run_show(only(config, stream), seq), as_json=as_json)


@quarantine.command("redecode")
def redecode_quarantine(
    config: opt.Configs,
    streams: opt.Streams = None,
    reasons: Annotated[
        list[str] | None,
        typer.Option("--reason", metavar="TEXT", help="Only messages with this text in `stage: error`; repeatable."),
    ] = None,
    start: opt.Start = None,
    end: opt.End = None,
    dry_run: opt.DryRun = False,
    as_json: opt.AsJson = False,
) -> None:
    """Decode the quarantine again. What succeeds moves to the archive."""
    from jetcapture_py.manage import many
    from jetcapture_py.manage import quarantine as command
    from jetcapture_py.rewriting.redecode import QuarantineSelection

    selection = QuarantineSelection(
        reasons=reasons or (), start=opt.time_option("--from", start), end=opt.time_option("--to", end)
    )
    files = many.captures(config, streams, find=many.in_archive)
    raise typer.Exit(
        many.run(
            files,
            lambda config, progress: command.run_redecode(config, selection, dry_run=dry_run, progress=progress),
            as_json=as_json,
        )
    )


@app.command()
def erase(
    config: opt.Configs,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Reason; it is stored: no personal data.")],
    key: Annotated[str | None, typer.Option("--key", metavar="KEY", help="Messages with this key.")] = None,
    subject: Annotated[
        str | None, typer.Option("--subject", metavar="SUBJECT", help="Messages on this subject; * and > match others.")
    ] = None,
    seqs: Annotated[
        str | None, typer.Option("--seq", metavar="A[-B]", help="Messages with these stream sequences.")
    ] = None,
    where: Annotated[
        str | None, typer.Option("--where", metavar="SQL", help="Messages for which this SQL condition is true.")
    ] = None,
    streams: opt.Streams = None,
    in_stream: Annotated[
        bool, typer.Option("--in-stream", help="Also delete from the stream all messages erased so far.")
    ] = False,
    dry_run: opt.DryRun = False,
    as_json: opt.AsJson = False,
) -> None:
    """Erase messages in every object and copy; print a certificate. Exit code 1 if something remains."""
    from jetcapture_py.manage import erase as command
    from jetcapture_py.manage import many
    from jetcapture_py.rewriting.select import Condition

    condition = Condition.parse(key, subject, seqs, where)
    opt.refuse((not reason.strip(), "--reason: expected a text, which becomes part of the tombstone"))
    raise typer.Exit(
        many.run(
            many.captures(config, streams, find=many.in_archive),
            lambda config, progress: command.run(
                config, condition, reason, in_stream=in_stream, dry_run=dry_run, progress=progress
            ),
            as_json=as_json,
            of_one=seqs is not None,  # every stream has sequences of its own
        )
    )


@app.command()
def restore(
    archive: opt.Archive,
    stream: opt.OneStream = None,
    target: Annotated[
        str | None, typer.Option("--as", metavar="NAME", help="Name of the new stream; default: STREAM.")
    ] = None,
    first: Annotated[int, typer.Option("--from-seq", metavar="N", min=1, help="First sequence to restore.")] = 1,
    last: Annotated[int | None, typer.Option("--to-seq", metavar="N", min=1, help="Last sequence to restore.")] = None,
    until: Annotated[
        str | None,
        typer.Option(
            "--to-time", metavar="TIME", help="Restore the stream as it was at this time; RFC 3339, inclusive."
        ),
    ] = None,
    created: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="If the stream was recreated, which incarnation to restore, by a prefix of its creation time. By "
            "default the latest.",
        ),
    ] = None,
    stream_config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Settings that replace those of the archived stream: a file with a section `stream`, as in a "
            "configuration, and as jetcapture export prints it.",
        ),
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option("--subject-prefix", metavar="PREFIX", help="Tokens to put in front of every subject."),
    ] = None,
    consumers: Annotated[
        list[str] | None,
        typer.Option(
            "--consumer",
            metavar="NAME=SEQ",
            help="Create a durable pull consumer that has acknowledged everything up to SEQ; repeatable. The capture's "
            "own consumer gets the settings of CONFIG.",
        ),
    ] = None,
    allow_holes: Annotated[
        bool,
        typer.Option("--allow-holes", help="Restore although sequences are missing, which become deleted messages."),
    ] = False,
    allow_drops: Annotated[
        bool, typer.Option("--allow-drops", help="Restore although the stream's limits drop some of the messages.")
    ] = False,
    without_limits: Annotated[
        bool,
        typer.Option(
            "--without-limits",
            help="Create the stream without max_age, max_msgs, max_bytes, max_msgs_per_subject and max_msg_size.",
        ),
    ] = False,
    with_schedules: Annotated[
        bool,
        typer.Option(
            "--with-schedules",
            help="Restore schedules as well: the server fires them again. By default they are left out and counted.",
        ),
    ] = False,
    nats: opt.NatsFile = None,
    context: opt.Context = None,
    servers: opt.Servers = None,
    options: opt.StoreOptions = None,
    dry_run: opt.DryRun = False,
) -> None:
    """Create a stream from its archive, exactly as it was. Needs nats-server 2.15; the stream must not exist."""
    from jetcapture_py.restoring import request as restoring
    from jetcapture_py.restoring.command import run
    from jetcapture_py.store.archive import open_archive

    chosen = opt.chosen_archive(archive, options, stream)
    request = restoring.RestoreRequest(
        files=open_archive(chosen.url, chosen.options),
        stream=chosen.stream,
        login=None if dry_run else opt.login(nats, context, servers, default=chosen.login),
        source=None if chosen.config is None else chosen.config.source,
        target=target or chosen.stream,
        first=first,
        last=last,
        until=opt.value_of("--to-time", restoring.parse_nanoseconds, until),
        created=created,
        stream_config=stream_config,
        prefix=opt.value_of("--subject-prefix", restoring.parse_prefix, prefix) or "",
        consumers=opt.option("--consumer", restoring.parse_consumer, consumers),
        allow_holes=allow_holes,
        allow_drops=allow_drops,
        without_limits=without_limits,
        with_schedules=with_schedules,
    )
    raise typer.Exit(run(request))
