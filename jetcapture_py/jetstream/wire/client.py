"""The receive path: MSG and HMSG frames of our own subscriptions become columns without per-message objects.

nats-py creates many objects per message. This module keeps its connection handling (TLS, authentication, reconnect,
PING) and replaces only the parser, before `connect()`: frames of registered subscriptions are recorded as offsets in
memory, many at once, and every other complete frame goes to the stock parser. Both use private members of nats-py, so
other versions than `NATS_PY` are refused.

It bypasses nats-py's statistics and pending limits; the pulls' credit limits what can arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nats.aio.client import Client, Srv
from nats.aio.msg import Msg
from nats.errors import Error

from jetcapture_py.errors import DeniedError
from jetcapture_py.jetstream.wire import transport
from jetcapture_py.jetstream.wire.inbox import Inbox
from jetcapture_py.jetstream.wire.parser import FrameParser, receive_failed
from jetcapture_py.jetstream.wire.transport import Transport
from jetcapture_py.threads import in_thread

NATS_PY = ("2.15.", "2.16.")
"""Versions whose internals are known, as pyproject.toml requires."""

Hook = Callable[[], Awaitable[None]]

logging.getLogger("nats").addHandler(logging.NullHandler())
"""Keeps nats-py's log lines from standard error in commands; `log.setup` makes events of them."""
_LOGIN = ("authorization violation", "authentication expired", "authentication revoked")
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
    match = _VIOLATION.search(str(error))
    return Denial(subject=match[2].lower(), subscription=match[1].lower() == "subscription") if match else None


class Connection(Client):
    """A nats-py client whose registered subscriptions fill an `Inbox` instead of making message objects.

    Before each attempt to reconnect, the functions `renew` return new options. They run in a thread. Their errors go to
    the error callback, and leave these options unchanged.

    The server does not answer a request that is denied, or whose reply subject is denied; it only sends an error that
    names the subject. That fails the waiting request immediately, and `denial_listeners` are called with it.
    """

    def __init__(self, *, require_tls: bool = False, renew: Iterable[Callable[[], Mapping[str, Any]]] = ()) -> None:
        super().__init__()
        self._require_tls = require_tls
        self._renew = tuple(renew)
        self.inboxes: dict[int, Inbox] = {}
        self.denial_listeners: list[Callable[[Denial], None]] = []
        self._requests: dict[asyncio.Future[Msg], str] = {}
        self._ps = self.parser = FrameParser(self, self.inboxes)

    def register(self, sid: int, inbox: Inbox) -> None:
        """Deliver messages of subscription `sid` to `inbox`."""
        self.inboxes[sid] = inbox

    def forget(self, sid: int) -> None:
        """Stop delivering messages of subscription `sid`."""
        self.inboxes.pop(sid, None)

    async def receive_into(self, inbox: Inbox, subject: str) -> int:
        """Subscribe and deliver to `inbox`; return the subscription's id."""
        subscription = await self.subscribe(subject)
        self.register(subscription._id, inbox)
        return subscription._id

    async def stop_receiving(self, sid: int) -> None:
        """Unsubscribe, once; messages already sent are still delivered to the inbox until `forget`."""
        if subscription := self._subs.get(sid):
            await subscription.unsubscribe()

    @property
    def server_version(self) -> str:
        """The version of the current or last server."""
        return str(self._server_info.get("version", ""))

    def watch(self, disconnected: Hook, reconnected: Hook, closed: Hook, error: Callable[[Exception], Any]) -> None:
        """Set the callbacks, once connected; the caller handles errors of the first attempts itself."""
        self._disconnected_cb, self._reconnected_cb = disconnected, reconnected
        self._closed_cb, self._error_cb = closed, error

    def _connect_command(self) -> bytes:
        """Return the CONNECT line with the credentials. Raises Error if TLS is required but not in use."""
        server = self._current_server
        secure = self._server_info.get("tls_required") or self.options["tls_handshake_first"]
        if self._require_tls and not secure and (server is None or server.uri.scheme != "wss"):
            raise Error("nats: TLS is configured, but the server does not offer it")
        return super()._connect_command()

    async def _process_err(self, err_msg: str) -> None:
        if denial := denial_in(err_msg):
            self._record_denial(denial)
        if self.options["allow_reconnect"] and any(word in err_msg.lower() for word in _LOGIN):
            error = Error(f"nats: {err_msg}")
            await self._error_cb(error)
            await self._process_op_err(error)  # the server's logins have changed, or this one has expired
        else:
            await super()._process_err(err_msg)

    def _record_denial(self, denial: Denial) -> None:
        """Call the listeners, and fail the requests that the server refuses."""
        for listener in self.denial_listeners:
            listener(denial)
        inboxes = self._inbox_prefix.decode()
        for refused, subject in self._requests.items():
            if refused.done():
                continue
            if checked := denial.about(subject):
                refused.set_exception(DeniedError(f"NATS refused: {refusal(checked)}"))
            elif denial.subscription and denial.subject.startswith(f"{inboxes}.".lower()):
                refused.set_exception(DeniedError(f"NATS refused: {refusal(f'{inboxes}.>', subscription=True)}"))

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():  # a flush gave up on it; nats-py would stop reading
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        inbox = self.inboxes.get(sid)
        if inbox is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        try:
            inbox.accept(sid, subject, reply, data, headers)
        except Exception as error:
            raise receive_failed(error) from error

    async def _connect_to_server(self, s: Srv) -> None:
        if self.is_reconnecting:
            await self._prepare_again()
        if self._transport or s.uri.scheme in ("ws", "wss"):
            await super()._connect_to_server(s)
        else:
            s.last_attempt = time.monotonic()
            self._transport = Transport()
            await self._transport.connect(s.uri, transport.READ, self.options["connect_timeout"])

    async def _prepare_again(self) -> None:
        """Renew options, and close the last attempt's connection, which nats-py leaves open after a refusal."""
        for renew in self._renew:
            try:
                self.options.update(await in_thread(renew))
            except Exception as error:
                await self._error_cb(error)
        refused: Any = self._transport
        if refused:
            refused.close()
            with contextlib.suppress(Exception):  # a WebSocket that is still open would be used again
                await asyncio.wait_for(refused.wait_closed(), 2 * transport.CLOSING)

    async def ask(self, subject: str, payload: bytes, timeout: float) -> Msg:
        """Send a request; return its answer. Raises the errors of nats-py's `request`, and `DeniedError`
        immediately."""
        refused: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._requests[refused] = subject
        answered = asyncio.ensure_future(self.request(subject, payload, timeout=timeout))
        try:
            await asyncio.wait({answered, refused}, return_when=asyncio.FIRST_COMPLETED)
            return refused.result() if refused.done() else answered.result()
        finally:
            del self._requests[refused]
            answered.cancel()
            await asyncio.gather(answered, return_exceptions=True)

    async def write(self, commands: bytes) -> None:
        """Send protocol commands, in order with all others; buffered while reconnecting.

        Waits for the socket only if more than the client's pending size is buffered.
        """
        await self._send_command(commands)
        await self._flush_pending()
