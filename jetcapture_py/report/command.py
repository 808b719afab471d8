"""The `report` command: one self-contained HTML page about an archive, without scripts."""

from __future__ import annotations

import sys
from pathlib import Path

from jetcapture_py.errors import JetcaptureError
from jetcapture_py.options import ChosenArchive
from jetcapture_py.reading.output import whole_file
from jetcapture_py.report.facts import Scope, collect
from jetcapture_py.report.page import page, verdict
from jetcapture_py.retry import retried
from jetcapture_py.store.archive import open_archive
from jetcapture_py.text import progress_bars
from jetcapture_py.verify.proof import own_suffix


def run(chosen: ChosenArchive, scope: Scope, output: Path) -> int:
    """Write the page and print its verdict; return the exit code. Raises JetcaptureError."""
    archive = open_archive(chosen.url, chosen.options)
    suffix = "" if chosen.config is None else own_suffix(chosen.config)
    with progress_bars() as progress:
        facts = retried(lambda: collect(archive, chosen.stream, scope, own_suffix=suffix, progress=progress))
    text = page(facts)
    try:
        with whole_file(output) as file:
            file.write(text)
    except OSError as error:
        raise JetcaptureError(f"cannot write {output}: {error.strerror or error}") from error
    sys.stdout.write(f"{output}: {verdict(facts).sentence}\n")
    return 0
