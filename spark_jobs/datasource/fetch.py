"""Read one range of a stream and detect data loss.

A consumer silently skips messages that are gone. So, with `failOnDataLoss`, the server is asked for the stream's first
sequence after every gap. If the stream now starts after the start of the gap, messages were removed before they were
read, by a purge or by a limit on the stream's size or age. Messages missing inside the stream are not a loss: they were
deleted one by one, or replaced by newer messages of their subject.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from math import inf
from typing import Any

from jetcapture_py.errors import MissingStreamError
from jetcapture_py.jetstream.range_reader import RangeReader, StreamRange
from jetcapture_py.jetstream.read_session import StreamState
from jetcapture_py.jetstream.wire.inbox import Received
from spark_jobs.datasource.offsets import StreamPartition, check_created, check_there
from spark_jobs.datasource.options import ReadOptions
from spark_jobs.datasource.session import Session

_CHECK_INTERVAL = 0.05
"""Minimum seconds between requests for the stream's first sequence; with `subjects`, gaps are frequent."""


class Fetch(RangeReader):
    """Iterate over the messages of `part` in chunks: pairs of consumer name and messages.

    `bare` omits payloads and headers. Raises SourceError when required messages are gone, or when expected messages do
    not arrive for `options.timeout` seconds.
    """

    def __init__(self, session: Session, options: ReadOptions, part: StreamPartition, *, bare: bool) -> None:
        wanted = StreamRange(
            stream=options.stream,
            first=part.first,
            end=part.end,
            subjects=options.subjects,
            per_subject=part.per_subject,
            headers_only=bare,
        )
        super().__init__(session.reads, wanted)
        self._run, self._options, self._part = session.run, options, part
        self._watched = options.fail_on_data_loss
        self._replicated = False
        self._floor = 0  # the stream's first sequence at the start of a `per_subject` read
        self._gap: int | None = None  # the last message before a gap that has not been checked yet
        self._checked_at = 0.0

    def __iter__(self) -> Iterator[tuple[str, Received]]:
        messages = self.messages()

        async def following() -> tuple[str, Received] | None:
            return await anext(messages, None)

        try:
            while (received := self._run(following())) is not None:
                yield received
        finally:
            self._run(messages.aclose())

    async def _started(self, answer: dict[str, Any]) -> None:
        state = await self._state()  # only now that the consumer exists: before, it might be another stream
        if self._part.per_subject:
            self._check_state(state, None)
            self._floor = self._floor or state.first
        else:
            self._check_state(state, self._last if self._gap is None else self._gap)
        self._gap = None
        self._replicated = state.replicated
        if state.created != self._part.created or (self._part.per_subject and not answer["num_pending"]):
            self._finish()

    @property
    def _replaced_after(self) -> float:
        return super()._replaced_after if self._part.per_subject else inf  # `timeout` says how long a read waits

    async def _failed(self, error: Exception) -> None:
        if self._watched or not isinstance(error, MissingStreamError):
            self._failure = error
        if isinstance(error, MissingStreamError):
            await self._leave()
            self._finish()

    async def _state(self) -> StreamState:
        return StreamState.of(await self._api.request(f"STREAM.INFO.{self._options.stream}"))

    def _check_state(self, state: StreamState, read_to: int | None) -> None:
        """Raise SourceError if the stream was recreated, or messages of the range after `read_to` are gone."""
        if not self._watched:
            return
        part, stream = self._part, self._options.stream
        check_created(stream, part.created, state.created)
        if read_to is not None and not (part.per_subject and state.keeps_latest):  # there, new messages replace old
            check_there(stream, max(read_to + 1, self._floor), state)
        check_there(stream, max(part.end, state.first), state)

    def _skips(self) -> None:
        if self._gap is None and self._watched and not self._part.per_subject:
            self._gap = self._last
            self._wake.set()

    @property
    def _settled(self) -> bool:
        return self._gap is None

    async def _check(self) -> None:
        if self._complete or asyncio.get_running_loop().time() > self._checked_at + _CHECK_INTERVAL:
            await self._check_gap()

    async def _check_end(self) -> None:
        if self._watched and self._gap is None:
            self._gap = self._last
        await self._check_gap()

    async def _check_gap(self) -> None:
        """Raise SourceError if messages were lost in the gap."""
        if self._gap is not None:
            read_to, self._gap = self._gap, None  # before awaiting: another gap may appear meanwhile
            self._check_state(await self._session.state(self._options.stream), read_to)
            self._checked_at = asyncio.get_running_loop().time()

    async def _more_elsewhere(self) -> bool:
        """Whether the stream's leader has further messages of the range that the consumer's server still lacks."""
        if not self._replicated or self._part.per_subject:
            return False
        following = await self._session.next_match(self._options.stream, self._last + 1, self._options.subjects)
        return following is not None and following < self._part.end
