"""One cell of the matrix: how a stream, consumer or server is set up, and what a capture then does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jetcapture_py.capture.pipeline import Capture
from jetcapture_py.jetstream.consumer import differing
from tests.integration.matrix.stage import Selection, ServerRefusedError, Stage, everything

Scene = Callable[[Stage], Awaitable[None]]
Change = Callable[[Stage, Capture], Awaitable[None]]


async def plain(stage: Stage) -> None:
    """Fill the stream with ordinary messages."""
    await stage.fill()


@dataclass(frozen=True, kw_only=True)
class Cell:
    """`name` is its row of the page, `note` a remark there.

    In order: a stream with the settings `stream`, a consumer with the settings `consumer` (None: the capture makes its
    own), `fill`, and a capture with the settings `source` until it has caught up, or with `during` while it holds what
    it has received. The archive then has what the stream had and `selects` chooses, and `after` checks more.

    With `refused`, the capture ends with that line instead, and the page says `verdict`. `play` replaces all of this.
    Servers before `since` do not support it: they refuse the stream or consumer, or ignore a setting, unless `lacking`
    checks something else.
    """

    name: str
    note: str = ""
    stream: Mapping[str, Any] = field(default_factory=dict)
    consumer: Mapping[str, Any] | None = None
    fill: Scene = plain
    source: Mapping[str, Any] = field(default_factory=dict)
    during: Change | None = None
    selects: Selection = everything
    after: Scene | None = None
    refused: str = ""
    verdict: str = "refused"
    play: Scene | None = None
    since: tuple[int, int] = (2, 10)
    lacking: Scene | None = None

    def result(self, version: tuple[int, int]) -> str:
        """What the page says for a server."""
        if version < self.since:
            return "no"
        return self.verdict if self.refused else "yes"

    async def run(self, stage: Stage) -> None:
        """Run the cell, and check its result."""
        stage.selects = self.selects
        if stage.site.version < self.since:
            await (self.lacking or self._lacks)(stage)
        elif self.play is not None:
            await self.play(stage)
        else:
            await self._arranged(stage)
            await self._captured(stage)

    async def _arranged(self, stage: Stage) -> None:
        await stage.create(**self.stream)
        if self.consumer is not None:
            await stage.consumer(**self.consumer)
        await self.fill(stage)

    async def _captured(self, stage: Stage) -> None:
        if self.refused:
            await stage.check_refused(self.refused, **self.source)
            return
        if self.during is None:
            await stage.look()
            await stage.capture(**self.source)
        else:
            async with stage.capturing(**self.source) as state:
                await self.during(stage, state)
        await stage.check_archive()
        await stage.check_consumer()
        if self.after is not None:
            await self.after(stage)

    async def _lacks(self, stage: Stage) -> None:
        """The server refuses what it does not support, or answers without it."""
        try:
            answer = await stage.create(**self.stream)
            ignored = bool(differing(stage.own(self.stream), answer["config"]))
            if self.consumer is not None:
                answer = await stage.consumer(**self.consumer)
                ignored |= bool(differing(stage.own(self.consumer), answer["config"]))
        except ServerRefusedError:
            return
        assert ignored, "the server supports it"
