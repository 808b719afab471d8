"""Commands without a process of their own: run here, or only checked for arguments that they understand."""

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


def check_jetcapture(words: list[str]) -> None:
    """Let the command's own parser read the arguments of `jetcapture`, and go no further."""
    name, command = "jetcapture", get_command(app)
    context: Any = None
    while True:
        context = command.make_context(name, list(words), parent=context)
        if not hasattr(command, "resolve_command"):
            return
        name, command, words = command.resolve_command(context, words)
