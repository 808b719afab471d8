"""Whether a command of an example or a document has arguments that it understands; nothing is run."""

from __future__ import annotations

from typing import Any

from typer.main import get_command

from jetcapture_py.cli import app


def check_jetcapture(words: list[str]) -> None:
    """Let the command's own parser read the arguments of `jetcapture`, and go no further."""
    name, command = "jetcapture", get_command(app)
    context: Any = None
    while True:
        context = command.make_context(name, list(words), parent=context)
        if not hasattr(command, "resolve_command"):
            return
        name, command, words = command.resolve_command(context, words)
