"""Report what the server does not allow this user.

The server does not answer a request that is denied, or whose reply subject is denied; it only sends an error that names
the subject. This module fails the waiting request immediately instead of letting it time out.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import nats.errors

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg

_VIOLATION = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"', re.IGNORECASE)
_DOMAIN = re.compile(r"^\$JS\.[^.]+\.API\.")
"""Prefix with a domain. In the domain itself, the server maps it to the prefix without one and checks that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Denial:
    """A refused subscription or publish. nats-py converts the subject to lower case."""

    subject: str
    subscription: bool

    def __str__(self) -> str:
        return refusal(self.subject, subscription=self.subscription)

    def about(self, subject: str) -> str | None:
        """Return `subject` as checked by the server, if this refusal is about publishing to it."""
        for checked in (subject, _DOMAIN.sub("$JS.API.", subject)):
            if not self.subscription and checked.lower() == self.subject:
                return checked
        return None


def refusal(subject: str, *, subscription: bool = False) -> str:
    """Describe the missing permission."""
    return f"this user may not {'subscribe' if subscription else 'publish'} to {subject}"


def denial_in(error: Exception | str) -> Denial | None:
    """Parse an error of the server; return None if it is not a refusal."""
    found = _VIOLATION.search(str(error))
    return Denial(subject=found[2].lower(), subscription=found[1].lower() == "subscription") if found else None


class DeniedError(nats.errors.Error):
    """The server refuses a request, or the subscription to its reply. The text names the missing permission."""


class Denials:
    """The requests of one connection that wait for a reply. `listeners` are called with every refusal."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[Denial], None]] = []
        self._waiting: dict[asyncio.Future[Msg], str] = {}

    def record(self, error: str, inbox_prefix: str) -> None:
        """Handle an error of the server: fail the requests that it refuses."""
        denial = denial_in(error)
        if denial is None:
            return
        for listener in self.listeners:
            listener(denial)
        for waiting, subject in self._waiting.items():
            if waiting.done():
                continue
            if checked := denial.about(subject):
                waiting.set_exception(DeniedError(refusal(checked)))
            elif denial.subscription and denial.subject.startswith(f"{inbox_prefix}.".lower()):
                waiting.set_exception(DeniedError(refusal(f"{inbox_prefix}.>", subscription=True)))

    async def request(self, client: Client, subject: str, payload: bytes, timeout: float) -> Msg:
        """Like the client's `request`, but raises `DeniedError` as well."""
        refused: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._waiting[refused] = subject
        answered = asyncio.ensure_future(client.request(subject, payload, timeout=timeout))
        try:
            await asyncio.wait({answered, refused}, return_when=asyncio.FIRST_COMPLETED)
            return refused.result() if refused.done() else answered.result()
        finally:
            del self._waiting[refused]
            answered.cancel()
            await asyncio.gather(answered, return_exceptions=True)
