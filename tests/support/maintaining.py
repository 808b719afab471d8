"""Passes over an archive, as `jetcapture maintain` and `jetcapture compact` make them."""

from __future__ import annotations

from dataclasses import replace
from threading import Event
from typing import Any

from jetcapture_py.config.model import Config
from jetcapture_py.maintain.compact import CompactionSettings
from jetcapture_py.maintain.passes import Pass, PassRequest, run_pass
from jetcapture_py.store.archive import open_archive
from jetcapture_py.table import compare
from jetcapture_py.verify.findings import Finding


class Maintenance:
    """One pass after the other; with `compact`, only of compaction."""

    def __init__(self, config: Config, *, compact: CompactionSettings | None = None, **options: Any) -> None:
        self.config = config
        self.request = replace(PassRequest.of(config), **options)
        if compact is not None:
            self.request = replace(self.request, compact=compact, keep=None)
        self.last: Pass | None = None

    def run(self, stop: Event | None = None) -> Pass:
        archive = open_archive(self.config.store.url, self.config.store.options)
        self.last = run_pass(self.config, archive, replace(self.request, stop=stop), self.last)
        return self.last


def compare_tables(config: Config) -> list[Finding]:
    return compare.compare_tables(config, open_archive(config.store.url, config.store.options))
