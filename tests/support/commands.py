"""Whether a command of an example or a document has arguments that it understands; nothing is run."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import typer

from jetcapture_py.cli import JOBS, app

if TYPE_CHECKING:
    import pytest


def check_job(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the job's own parser read its arguments, and go no further."""
    assert words[:1] == ["spark"]
    module = import_module(f"spark_jobs.{words[1]}")
    monkeypatch.setattr(module, "guarded", lambda _name, _job: 0)
    assert words[1] in JOBS
    assert module.main(words[2:]) == 0


def check_jetcapture(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command's own parser read the arguments of `jetcapture`, and go no further."""
    if words[0] == "spark":
        return check_job(words, monkeypatch)
    command = typer.main.get_command(app).commands[words[0]]  # type: ignore[attr-defined]
    command.make_context(words[0], words[1:])
    return None
