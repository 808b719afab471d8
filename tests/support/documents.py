"""The documents, and the blocks of code in them."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(REPOSITORY).as_posix() for path in [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")]
)
ARCHIVE = "/var/lib/jetcapture"
"""Where the archive lies in every example."""
SERVER = "nats://127.0.0.1:4222"
"""The server in every example."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page; `file` is the name that the text before it says to save it as."""

    page: str
    language: str
    text: str
    file: str | None

    def __str__(self) -> str:
        return f"{self.page}: {self.text.splitlines()[0]}"


def read(page: str) -> str:
    return (REPOSITORY / page).read_text()


def blocks(page: str, language: str | None = None) -> list[Block]:
    found, end = [], 0
    text = read(page)
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        before = text[end : match.start()]
        saved = re.findall(r"\b[Ss]ave this as `([\w.]+)`", before)
        found.append(Block(page, match[1], match[2], saved[-1] if saved else None))
        end = match.end()
    return [block for block in found if language in (None, block.language)]


def every(language: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page, language)]


def section(page: str, title: str) -> str:
    """Return the text from a heading to the next one of its level or above."""
    match = re.search(rf"^(#+) {re.escape(title)}\n(.*?)(?=^#{{1,2}} |\Z)", read(page), re.DOTALL | re.MULTILINE)
    assert match is not None, f"{page} has no section {title}"
    return match[2]


def first_cells(table: str) -> set[str]:
    """Return what stands in backticks in the first column of a table."""
    rows = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def commands(block: Block) -> list[str]:
    """Return the commands of a block for a shell, without comments, continued lines as one."""
    text = block.text.replace("\\\n", " ")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def generator() -> ModuleType:
    """Return what `make docs` runs."""
    specification = importlib.util.spec_from_file_location("generate", REPOSITORY / "docs" / "generate.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module
