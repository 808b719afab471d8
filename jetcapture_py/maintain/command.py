"""The commands `maintain` and `compact`: one pass over the archives of one or several captures."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType

from jetcapture_py.compaction.summary import failure
from jetcapture_py.config.captures import CaptureFiles, Captures
from jetcapture_py.config.maintain import CompactConfig
from jetcapture_py.config.model import Config
from jetcapture_py.config.section import validated
from jetcapture_py.errors import ConfigError, JetcaptureError
from jetcapture_py.maintain.compact import CompactionSettings
from jetcapture_py.maintain.passes import PassRequest, Progress, run_pass
from jetcapture_py.manage import many
from jetcapture_py.manage.many import CommandResult, reason_of
from jetcapture_py.reading.selection import Selection
from jetcapture_py.store.archive import open_archive
from jetcapture_py.threads import leave

DONE, FAILED = 0, 1
"""Exit codes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactRequest:
    """The request of the command `compact`."""

    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings that override `maintain.compact`, as text."""
    selection: Selection = field(default_factory=Selection)
    """Keys, and times of buckets."""
    incomplete: bool = False
    """Also compact buckets that the watermark has not passed."""

    def of(self, config: Config) -> CompactionSettings:
        """Return the settings for one capture."""
        given = (config.maintain.compact if config.maintain else None) or CompactConfig()
        settings = CompactionSettings.of(validated(CompactConfig, {**given.model_dump(), **self.settings}))
        return replace(settings, selection=self.selection, incomplete=self.incomplete)


def maintain(
    files: CaptureFiles, request: CompactRequest | None = None, *, dry_run: bool = False, as_json: bool = False
) -> int:
    """Make one pass over the archive of each capture, with `request` only of compaction; return the exit code.

    Raises ConfigError, and JetcaptureError if the pass over the only archive fails.
    """
    selected = required(files, section=request is None)

    def work(config: Config, progress: Progress) -> CommandResult:
        notices: list[str] = []
        asked = PassRequest.of(config) if request is None else PassRequest(compact=request.of(config))
        asked = replace(asked, dry_run=dry_run, tell=notices.append, progress=_bars(progress))
        try:
            result = run_pass(config, open_archive(config.store.url, config.store.options), asked)
        except Exception as error:  # including bugs, of libraries too
            raise JetcaptureError(reason_of(error)) from error
        reason = failure(result.errors)
        return CommandResult(
            summary=result.summary,
            lines=result.lines(),
            records=[result.as_dict()],
            notices=[*notices, reason] if reason else notices,
            code=FAILED if reason else DONE,
        )

    with handling(_interrupted, signal.SIGINT):
        return many.run(files, work, selected=selected, as_json=as_json)


def required(files: CaptureFiles, *, section: bool) -> Captures:
    """Return the captures. Raises JetcaptureError, also if a file lacks `maintain` with `section`."""
    selected = files.select()
    lacking = {capture.path: None for capture, config in selected.configs.items() if config.maintain is None}
    if section and lacking:
        raise ConfigError(*(f"{'' if files.single else f'{path}: '}{_NO_SECTION}" for path in lacking))
    return selected


_NO_SECTION = "maintain: required by `jetcapture maintain`, but not set, such as {compact: {}}"


def _bars(show: Progress) -> Progress:
    """Return the progress callback that shows a bar per part of an archive."""
    totals: dict[str, int] = {}

    def progress(part: str, objects: int, _size: int) -> None:
        total = totals.setdefault(part, objects)
        if total:
            show(f"compacting {part}", total - objects, total)

    return progress


@contextmanager
def handling(handler: Callable[[int, FrameType | None], object], *numbers: signal.Signals) -> Iterator[None]:
    """Handle signals inside the block."""
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, previous in zip(numbers, before, strict=True):
            signal.signal(number, previous)


def _interrupted(*_: object) -> None:
    sys.stderr.write("jetcapture: interrupted; another pass goes on from here\n")
    leave(many.INTERRUPTED)
