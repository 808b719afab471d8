"""Unacknowledged messages, written or waiting to be written, in order. No I/O."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

from jetcapture_py.jetstream.publish.frames import has_id


class Refusal(NamedTuple):
    """A refused message: number of refusals, whether the error is temporary, and its text."""

    times: int
    temporary: bool
    text: str


class InFlight:
    """Messages by the subject of their acknowledgement; `size` is their bytes.

    `acknowledged` and `duplicates` count accepted messages. A temporarily refused message is held back until `release`,
    together with everything not written yet, which must not overtake it.
    """

    def __init__(self) -> None:
        self.size = 0
        self.acknowledged = 0
        self.duplicates = 0
        self.waiting_size = 0
        self._frames: dict[bytes, bytes] = {}
        self._waiting: list[bytes] = []  # frames to write, for the first time or again
        self._held: set[bytes] = set()
        self._refused: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def held(self) -> bool:
        """Whether nothing may be written for now."""
        return bool(self._held)

    def add(self, replies: list[bytes], frames: list[bytes]) -> None:
        """Append messages."""
        size = sum(map(len, frames))
        self._frames.update(zip(replies, frames, strict=True))
        self._waiting += frames
        self.size += size
        self.waiting_size += size

    def take(self) -> bytes:
        """Take the bytes to write now."""
        if self._held or not self._waiting:
            return b""
        data = b"".join(self._waiting)
        self._waiting.clear()
        self.waiting_size = 0
        return data

    def again(self) -> int:
        """Queue all messages to be written again, because none will be acknowledged any more.

        Returns the number of messages that this could store twice: written before, and without an id. If it is not 0,
        the caller must not write.
        """
        messages = list(self._frames.items())
        written = messages[: len(messages) - len(self._waiting)]
        unsafe = sum(not has_id(frame) for reply, frame in written if reply not in self._held)
        self._held.clear()
        self._waiting, self.waiting_size = [frame for _, frame in messages], self.size
        return unsafe

    def release(self) -> None:
        """Queue held messages to be written again, before those that follow them."""
        again = [frame for reply, frame in self._frames.items() if reply in self._held]
        self._held.clear()
        self._waiting[:0] = again
        self.waiting_size += sum(map(len, again))

    def acknowledge(self, subjects: list[bytes], answers: list[bytes]) -> Iterator[tuple[str, Refusal]]:
        """Process the server's answers; yield refusals with the subjects of their messages."""
        frames = self._frames
        for subject, answer in zip(subjects, answers, strict=True):
            frame = frames.get(subject)
            if frame is None:  # a second acknowledgement, of a message published again
                continue
            if (not answer or b'"error"' in answer) and (problem := _problem(answer)) is not None:
                times = self._refused[subject] = self._refused.get(subject, 0) + 1
                if problem[0]:
                    self._held.add(subject)
                yield frame.split(b" ", 2)[1].decode(errors="replace"), Refusal(times, *problem)
                continue
            del frames[subject]
            self.size -= len(frame)
            self.acknowledged += 1
            if b'"duplicate"' in answer:
                self.duplicates += 1


def _problem(data: bytes) -> tuple[bool, str] | None:
    """Return whether a refusal is temporary, and its text; None for an acknowledgement."""
    if not data:
        return True, "no stream listens on it"
    try:
        error = json.loads(data).get("error")
        if error is None:
            return None
        text = f"{error.get('description', 'no reason given')} ({error.get('err_code', 0)})"
        return error.get("code") in (429, 503), text
    except (ValueError, AttributeError):
        return False, f"unexpected answer {data[:100]!r}"
