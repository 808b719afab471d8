"""The findings of a check: one line each, which says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.text import Text

Level = Literal["ok", "skipped", "warning", "problem"]
_STYLES = {"ok": "green", "skipped": "dim", "warning": "yellow", "problem": "red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFinding:
    """One line. A problem keeps a capture from working or loses messages; a warning should be fixed."""

    level: Level
    about: str
    text: str


@dataclass(slots=True)
class Findings:
    """All findings of a check, and the figures they are based on."""

    found: list[CheckFinding] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def ok(self, about: str, text: str) -> None:
        """Add a passed check."""
        self.found.append(CheckFinding(level="ok", about=about, text=text))

    def skipped(self, about: str, text: str) -> None:
        """Add a check that could not be made."""
        self.found.append(CheckFinding(level="skipped", about=about, text=text))

    def warning(self, about: str, text: str) -> None:
        """Add a warning."""
        self.found.append(CheckFinding(level="warning", about=about, text=text))

    def problem(self, about: str, text: str) -> None:
        """Add a problem."""
        self.found.append(CheckFinding(level="problem", about=about, text=text))

    @property
    def problems(self) -> list[CheckFinding]:
        """The problems."""
        return [each for each in self.found if each.level == "problem"]

    def fields(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {"ok": not self.problems, "findings": [asdict(each) for each in self.found], "figures": self.figures}

    def lines(self) -> Iterator[Text]:
        """Yield one line per finding."""
        for each in self.found:
            line = Text(each.level.ljust(8), _STYLES[each.level])
            line.append(f" {each.about.ljust(12)} ", "default")
            line.append(each.text, "default")
            yield line
