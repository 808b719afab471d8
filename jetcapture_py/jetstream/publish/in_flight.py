"""What is under way: messages written, or waiting to be, and not acknowledged yet. In order, and without any I/O."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

from jetcapture_py.jetstream.publish.frames import has_id


class Refusal(NamedTuple):
    """A message that a server did not take: how often it has not, whether that may change, and what was said."""

    times: int
    temporary: bool
    text: str


class InFlight:
    """Messages by the subject of their acknowledgement; `size` counts their bytes.

    `acknowledged` and `duplicates` count what was taken. A message that is refused for the time being is held back,
    and with it everything that is not written yet, until `release`: what follows must not overtake it.
    """

    def __init__(self) -> None:
        self.size = 0
        self.acknowledged = 0
        self.duplicates = 0
        self.waiting_size = 0
        self._frames: dict[bytes, bytes] = {}
        self._waiting: list[bytes] = []  # frames that are not written yet, or have to be once more
        self._held: set[bytes] = set()
        self._refused: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def held(self) -> bool:
        """Whether nothing may be written for now."""
        return bool(self._held)

    def add(self, replies: list[bytes], frames: list[bytes]) -> None:
        """More messages, to be written behind all others."""
        size = sum(map(len, frames))
        self._frames.update(zip(replies, frames, strict=True))
        self._waiting += frames
        self.size += size
        self.waiting_size += size

    def take(self) -> bytes:
        """What is to be written now."""
        if self._held or not self._waiting:
            return b""
        data = b"".join(self._waiting)
        self._waiting.clear()
        self.waiting_size = 0
        return data

    def again(self) -> int:
        """Nothing of it will be acknowledged any more: write all of it once more.

        Returns how many messages that could store twice, because they were written and have no id; then it must not be.
        """
        messages = list(self._frames.items())
        written = messages[: len(messages) - len(self._waiting)]
        unsafe = sum(not has_id(frame) for reply, frame in written if reply not in self._held)
        self._held.clear()
        self._waiting, self.waiting_size = [frame for _, frame in messages], self.size
        return unsafe

    def release(self) -> None:
        """Write again what was held back, in front of what follows it."""
        again = [frame for reply, frame in self._frames.items() if reply in self._held]
        self._held.clear()
        self._waiting[:0] = again
        self.waiting_size += sum(map(len, again))

    def acknowledge(self, subjects: list[bytes], answers: list[bytes]) -> Iterator[tuple[str, Refusal]]:
        """Take the server's answers; gives the refusals among them, with the subjects of their messages."""
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
    """Whether a refusal is temporary, and its text; None when the answer is no refusal."""
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
