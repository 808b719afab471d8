"""Every status the server can send to a pull (ADR-37, ADR-42), and what it means to us."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto


class Reaction(Enum):
    """What a status asks for."""

    ALIVE = auto()
    """The pull goes on: an idle heartbeat."""
    PULL_AGAIN = auto()
    """The pull is over as pulls are; ask again at once."""
    PULL_LATER = auto()
    """The pull is over and asking at once would not help; ask again after a pause."""
    TOO_LARGE = auto()
    """The pull is over because the next message is larger than what is left of its bytes; if it brought nothing, ask
    for more."""
    ADAPT = auto()
    """The pull asked for more than the consumer allows; read its limits and ask for less."""
    FATAL = auto()
    """No pull will ever work."""


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
    """The status in the first line of a header block, such as `NATS/1.0 408 Request Timeout`.

    What no version of the server is known to send counts as a passing fault: the pull is made again after a pause.
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
    """How many of the messages that the pull asked for it will not bring; None where the status does not say.

    The others may still follow: a replicated consumer sends a message only once its replicas know of the delivery.
    """
    found = _UNDELIVERED.search(block)
    return int(found[1]) if found else None


def undelivered_bytes(block: bytes) -> int | None:
    """How many of the bytes that the pull asked for it will not bring; None where the status does not say."""
    found = _UNDELIVERED_BYTES.search(block)
    return int(found[1]) if found else None
