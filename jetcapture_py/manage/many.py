"""One command for one or many captures: find the streams of a configuration, do the work for each, and print it.

One capture is shown in full. Of many, each is one line, and the worst exit code counts.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from jetcapture_py import text
from jetcapture_py.config.captures import (
    CAPTURES_AT_ONCE,
    AccountConfig,
    CaptureFiles,
    CaptureId,
    Captures,
    Find,
    Parse,
    SelectedStreams,
)
from jetcapture_py.config.model import Config, parse
from jetcapture_py.errors import ConfigError, JetcaptureError
from jetcapture_py.jetstream.streams import on_server
from jetcapture_py.store.archive import ArchiveFiles
from jetcapture_py.text import escaped, one_line
from jetcapture_py.threads import leave
from jetcapture_py.verify.findings import Progress, ignore

log = logging.getLogger("jetcapture.many")

NOTHING = "no captures: the configuration selects no stream and no bucket\n"
INTERRUPTED = 128 + signal.SIGINT
_WORST = (0, 3, 1, 2)
"""Exit codes, the worst last."""


# ---------------------------------------------------------------------- streams


def in_archive(file: AccountConfig) -> SelectedStreams:
    """Find the streams in the archive, including deleted ones; the server's if no archive can list all.

    Raises JetcaptureError.
    """
    if file.divided:
        return on_server(file)
    archive = ArchiveFiles(file.sample.store.url, file.sample.store.options)
    return SelectedStreams([name for name in archive.streams() if file.selects(name)])


def captures(
    paths: Sequence[Path],
    streams: Sequence[str] | None = None,
    http: str | None = None,
    *,
    find: Find = on_server,
    together: bool = False,
    parse: Parse = parse,
) -> CaptureFiles:
    """Return a command's files. With `together`, their captures must be able to run in one process."""
    return CaptureFiles(paths, http, find=find, streams=streams or (), together=together, parse=parse)


# ---------------------------------------------------------------------- work


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """A command's output about one capture."""

    summary: str
    """One line, for a list of captures; not escaped."""
    lines: Iterable[str | Text] = ()
    """Full output, for one capture."""
    records: Iterable[Mapping[str, Any]] = ()
    """The full output as JSON objects, one per line."""
    as_list: bool = False
    """Whether the records of a single capture are printed as one JSON array."""
    notices: Iterable[str] = ()
    """Lines for standard error."""
    code: int = 0
    """The exit code."""


def run(
    files: CaptureFiles,
    work: Callable[[Config, Progress], CommandResult],
    *,
    selected: Captures | None = None,
    as_json: bool = False,
    at_once: bool = False,
    of_one: bool = False,
    tell_left_out: bool = False,
    if_none: int = 0,
) -> int:
    """Do `work` for every capture, `at_once` for several; print the results, and return the worst exit code.

    `selected` is the selection of the files, if known. If the work fails for one of many captures, the others are still
    done. With `of_one`, there must be a single capture. `tell_left_out` also prints skipped streams. `if_none` is the
    exit code without any capture. Raises ConfigError for wrong files, and JetcaptureError if streams cannot be found,
    or if the work fails for a single capture.
    """
    selected = files.select() if selected is None else selected
    if of_one and len(selected.configs) > 1:
        raise ConfigError(f"expected one capture, got {len(selected.configs)}; --stream chooses one")
    if files.shows_one(selected) or (of_one and selected.configs and not selected.problems):
        with text.progress_bars() as progress:
            result = work(next(iter(selected.configs.values())), progress)
        code = show_one(result, as_json=as_json)
        _tell("", result.notices)
        return code
    others = selected.left_out if tell_left_out else {}
    captures = sorted({*selected.configs, *selected.problems, *others}, key=lambda capture: capture.name)
    width = max((len(escaped(capture.name)) for capture in captures), default=0)
    codes = [0 if captures else if_none]
    if not captures:
        sys.stderr.write(NOTHING)
    with ThreadPoolExecutor(CAPTURES_AT_ONCE, "captures") as pool:

        def attempted(capture: CaptureId) -> CommandResult:
            if capture in others:
                return CommandResult(summary=f"left out: {others[capture]}", records=[{"left_out": others[capture]}])
            if capture in selected.problems:
                return failed(ConfigError(*(line.removeprefix(f"{capture}: ") for line in selected.problems[capture])))
            config = selected.configs[capture]
            try:
                if at_once:
                    return work(config, ignore)
                with text.progress_bars() as show:
                    return work(config, lambda stage, *amounts: show(f"{capture.name}: {stage}", *amounts))
            except Exception as error:  # including bugs, of libraries too: the others are done
                return failed(error)

        results = pool.map(attempted, captures) if at_once else map(attempted, captures)
        try:
            for capture, result in zip(captures, results, strict=True):
                codes.append(result.code)
                config = selected.configs.get(capture)
                stream = capture.stream if config is None else config.source.stream
                _show_line(capture.name, stream, result, width, as_json=as_json)
                _tell(f"{capture.name}: ", result.notices)
        except KeyboardInterrupt:
            if at_once:
                leave(INTERRUPTED)  # a thread may run for long, or hang
            raise
    return max(codes, key=_WORST.index)


def show_one(result: CommandResult, *, as_json: bool = False) -> int:
    """Print the full output of one capture; return the exit code."""
    if as_json:
        values: Iterable[object] = [list(result.records)] if result.as_list else result.records
        sys.stdout.writelines(_json(value) for value in values)
    else:
        console = Console(soft_wrap=True, highlight=False)
        for line in result.lines:
            if isinstance(line, Text):
                console.print(line)
            else:
                sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
    return result.code


def _show_line(name: str, stream: str, result: CommandResult, width: int, *, as_json: bool) -> None:
    """Print one of many captures; as JSON, one line per record."""
    if as_json:
        about = {"capture": name, "stream": stream}
        sys.stdout.writelines(_json(about | dict(record)) for record in result.records)
    else:
        sys.stdout.write(f"{escaped(name).ljust(width)}  {one_line(result.summary, text.MAX_LOGGED)}\n")
    sys.stdout.flush()


def _tell(label: str, notices: Iterable[str]) -> None:
    sys.stderr.writelines(f"jetcapture: {label}{one_line(notice, text.MAX_LOGGED)}\n" for notice in notices)


def _json(value: object) -> str:
    """Return a record as a JSON line that cannot affect a terminal."""
    return json.dumps(value).replace("\x7f", "\\u007f") + "\n"


def failed(error: Exception) -> CommandResult:
    """Return the output for a capture whose work failed."""
    reason, code = reason_of(error), 2 if isinstance(error, ConfigError) else 1
    return CommandResult(summary=f"failed: {reason}", records=[{"error": reason}], code=code)


def reason_of(error: Exception) -> str:
    """Return an error as one line."""
    if isinstance(error, JetcaptureError):
        return "; ".join(str(error).splitlines())
    log.debug("traceback", exc_info=error)
    return one_line(error)
