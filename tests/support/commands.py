"""Commands: run as a process or here, or only checked for arguments that they understand."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest
from typer.main import get_command

from jetcapture_py.cli import app, main


def jetcapture(*words: object) -> subprocess.CompletedProcess[str]:
    """Run the command line here, but not `run`, which ends the process; the exit code and what was printed."""
    arguments = ["jetcapture", *map(str, words)]
    output, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(errors):
        patch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as ended:
            main()
    return subprocess.CompletedProcess(arguments, int(ended.value.code or 0), output.getvalue(), errors.getvalue())


def process(*command: object, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a command as a process; the exit code and what was printed. `how` are arguments of `subprocess.run`."""
    words = [*map(str, command)]
    return subprocess.run(words, capture_output=True, text=True, check=False, **{"timeout": 600, **how})


def check_jetcapture(words: list[str]) -> None:
    """Let the command's own parser read the arguments of `jetcapture`, and go no further."""
    name, command = "jetcapture", get_command(app)
    context: Any = None
    while True:
        context = command.make_context(name, list(words), parent=context)
        if not hasattr(command, "resolve_command"):
            return
        name, command, words = command.resolve_command(context, words)
