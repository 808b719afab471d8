"""The `verify` command: run the proof with a progress bar, repair on request, and print the report."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Self

from jetcapture_py.config.model import Config
from jetcapture_py.verify.proof import verify


def run(config: Config, *, deep: bool, content: bool, as_json: bool, strict: bool, repair: bool = False) -> int:
    """Run the proof, print the report to standard output, and return the exit code.

    With `repair`, missing messages are stored first, as far as the stream has them.
    """
    if repair:
        return _repair(config, deep=deep, content=content, as_json=as_json, strict=strict)
    with _Bar() as bar:
        report = asyncio.run(verify(config, deep=deep, content=content, progress=bar.show))
    sys.stdout.write((report.as_json(strict=strict) if as_json else report.as_text()) + "\n")
    return report.exit_code(strict=strict)


def _repair(config: Config, *, deep: bool, content: bool, as_json: bool, strict: bool) -> int:
    from jetcapture_py.verify.repair import verify_and_repair  # imports the capture

    with _Bar() as bar:
        report, done = asyncio.run(verify_and_repair(config, deep=deep, content=content, progress=bar.show))
    if as_json:
        sys.stdout.write(report.as_json(strict=strict, repair=done.fields()) + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in (report.as_text(), *done.lines(report)))
    return report.exit_code(strict=strict)


class _Bar:
    """A progress bar on standard error, if that is a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        console = Console(stderr=True)
        self._progress = Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty())
        self._tasks: dict[str, Any] = {}

    def show(self, stage: str, done: int, total: int) -> None:
        """Update the progress of a stage."""
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage)
        self._progress.update(self._tasks[stage], completed=done, total=total)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
