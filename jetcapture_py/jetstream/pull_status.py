"""Statuses that the server sends for pulls (ADR-37, ADR-42), and the reaction to each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto


class Reaction(Enum):
    """Reaction to a status."""

    ALIVE = auto()
    """Idle heartbeat: the pull continues."""
    PULL_AGAIN = auto()
    """The pull has ended normally; pull again immediately."""
    PULL_LATER = auto()
    """The pull has ended with a temporary error; pull again after a pause."""
    TOO_LARGE = auto()
    """The pull has ended because the next message exceeds its remaining bytes; if it brought nothing, ask for more."""
    ADAPT = auto()
    """The pull asked for more than the consumer allows; read the consumer's limits and ask for less."""
    FATAL = auto()
    """Pulls can never succeed."""


@dataclass(frozen=True, slots=True)
class PullStatus:
    """A status frame: `code` and `text` as sent."""

    code: int
    text: str
    reaction: Reaction


_CONFLICTS = (
    ("message size exceeds maxbytes", Reaction.TOO_LARGE),
    ("batch completed", Reaction.PULL_AGAIN),
    ("server shutdown", Reaction.PULL_LATER),
    ("leadership change", Reaction.PULL_LATER),
    ("exceeded maxwaiting", Reaction.PULL_LATER),
    ("exceeded maxrequest", Reaction.ADAPT),
    ("consumer deleted", Reaction.FATAL),
    ("consumer is push based", Reaction.FATAL),
)
_CODES = {
    100: Reaction.ALIVE,
    404: Reaction.PULL_AGAIN,
    408: Reaction.PULL_AGAIN,
    400: Reaction.FATAL,
    412: Reaction.FATAL,
    423: Reaction.PULL_LATER,
    503: Reaction.PULL_LATER,
}


def parse_status(block: bytes) -> PullStatus:
    """Parse the first line of a header block, such as `NATS/1.0 408 Request Timeout`.

    Unknown statuses count as temporary errors.
    """
    line = block.split(b"\r\n", 1)[0].decode("utf-8", "replace")
    _, _, rest = line.partition(" ")
    code, _, text = rest.strip().partition(" ")
    number = int(code) if code.isascii() and code.isdigit() and len(code) == 3 else 0
    reaction = _CODES.get(number, Reaction.PULL_LATER)
    if number == 409:
        lowered = text.lower()
        reaction = next((reaction for start, reaction in _CONFLICTS if lowered.startswith(start)), reaction)
    return PullStatus(number, text, reaction)


_UNDELIVERED = re.compile(rb"\r\nNats-Pending-Messages: *([0-9]{1,9})\r\n", re.IGNORECASE)
_UNDELIVERED_BYTES = re.compile(rb"\r\nNats-Pending-Bytes: *([0-9]{1,12})\r\n", re.IGNORECASE)


def undelivered(block: bytes) -> int | None:
    """Return how many of the pull's messages will not be delivered; None if the status does not say.

    The others may still follow: a replicated consumer sends a message only after its replicas know of the delivery.
    """
    found = _UNDELIVERED.search(block)
    return int(found[1]) if found else None


def undelivered_bytes(block: bytes) -> int | None:
    """Return how many of the pull's bytes will not be delivered; None if the status does not say."""
    found = _UNDELIVERED_BYTES.search(block)
    return int(found[1]) if found else None
