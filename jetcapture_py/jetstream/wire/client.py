"""The fast receive path: whole MSG and HMSG frames of our own subscriptions, straight into columns.

nats-py builds a task's worth of objects per message. Here its connection (TLS, authentication, reconnect, PING) is
kept and only the parser is replaced, before `connect()`: frames of registered subscriptions are taken as places in
memory, many at once, and every other frame goes to the stock parser, whole. Where nats-py's internals are not the ones
this was written against, `Connection._process_msg` receives the same messages through the stock parser, slower.

Bypassed on the fast path: nats-py's statistics and its pending limits; the pulls' credit bounds what can arrive.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

from nats.aio.client import Client, Srv
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error
from nats.protocol.parser import Parser

from jetcapture_py.jetstream.permissions import Denials
from jetcapture_py.jetstream.wire import transport
from jetcapture_py.jetstream.wire.inbox import Inbox
from jetcapture_py.jetstream.wire.parser import FrameParser, receive_failed
from jetcapture_py.jetstream.wire.transport import Transport

Hook = Callable[[], Awaitable[None]]


class Connection(Client):
    """A nats-py client whose registered subscriptions fill an `Inbox` instead of making message objects."""

    def __init__(self, *, fast: bool = True, require_tls: bool = False) -> None:
        super().__init__()
        self._require_tls = require_tls
        self.inboxes: dict[int, Inbox] = {}
        self._filling: dict[int, Subscription] = {}
        self.denials = Denials()
        self.fast = fast and supported()
        if self.fast:
            self._ps = FrameParser(self, self.inboxes)

    def register(self, sid: int, inbox: Inbox) -> None:
        """From now on, messages of subscription `sid` go to `inbox`."""
        self.inboxes[sid] = inbox

    def forget(self, sid: int) -> None:
        """No more messages of subscription `sid` are expected."""
        self.inboxes.pop(sid, None)

    async def receive_into(self, inbox: Inbox, subject: str) -> int:
        """Subscribe, and have what comes go to `inbox`; returns the subscription's number."""
        subscription = await self.subscribe(subject)
        self.register(subscription._id, inbox)
        self._filling[subscription._id] = subscription
        return subscription._id

    async def stop_receiving(self, sid: int) -> None:
        """Unsubscribe, once; what the server has sent before still goes to the inbox until `forget`."""
        if subscription := self._filling.pop(sid, None):
            await subscription.unsubscribe()

    @property
    def reads(self) -> int:
        """Times that the socket has given bytes, be it a part of a message; not counted where the parser is stock."""
        return self._ps.reads if isinstance(self._ps, FrameParser) else 0

    @property
    def server_id(self) -> str:
        """Identifies a server from its start to its end; that of the last one while disconnected."""
        return str(self._server_info.get("server_id", ""))

    def watch(self, disconnected: Hook, reconnected: Hook, closed: Hook, error: Callable[[Exception], Any]) -> None:
        """Call these from now on; what befell the first attempts to connect was the caller's own to see."""
        self._disconnected_cb, self._reconnected_cb = disconnected, reconnected
        self._closed_cb, self._error_cb = closed, error

    def _connect_command(self) -> bytes:
        """The CONNECT line, which carries the credentials: never sent in the clear when TLS was asked for."""
        server = self._current_server
        secure = self._server_info.get("tls_required") or self.options["tls_handshake_first"]
        if self._require_tls and not secure and (server is None or server.uri.scheme != "wss"):
            raise Error("nats: TLS is configured, but the server does not offer it")
        return super()._connect_command()

    async def _process_err(self, err_msg: str) -> None:
        self.denials.note(err_msg, self._inbox_prefix.decode())
        await super()._process_err(err_msg)

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
        if self._transport or s.uri.scheme in ("ws", "wss") or not self.fast:
            await super()._connect_to_server(s)
        else:
            s.last_attempt = time.monotonic()
            self._transport = Transport()
            await self._transport.connect(s.uri, transport.READ, self.options["connect_timeout"])

    async def ask(self, subject: str, payload: bytes, timeout: float) -> Msg:
        """The answer to a request. Raises as nats-py's `request` does, and `DeniedError` at once."""
        return await self.denials.request(self, subject, payload, timeout)

    async def write(self, commands: bytes) -> None:
        """Send protocol commands, in order with all others; buffered while reconnecting.

        Waits for the socket only when more than the client's pending size has piled up.
        """
        await self._send_command(commands)
        await self._flush_pending()


PRIVATE = frozenset(
    {
        "_closed_cb",
        "_connect_command",
        "_connect_to_server",
        "_current_server",
        "_disconnected_cb",
        "_error_cb",
        "_flush_pending",
        "_inbox_prefix",
        "_process_err",
        "_process_msg",
        "_ps",
        "_reconnected_cb",
        "_send_command",
        "_server_info",
        "_transport",
    }
)
"""What is used here and in `jetstream.publish` of nats-py's client, and is not public."""


def supported() -> bool:
    """Whether nats-py is made as this and `FrameParser`, which stands in for its parser, expect."""
    client = Client()
    return (
        all(hasattr(client, name) for name in PRIVATE)
        and vars(Subscription(client, 7)).get("_id") == 7
        and type(getattr(client, "_ps", None)) is Parser
        and inspect.iscoroutinefunction(Parser.parse)
        and list(inspect.signature(Parser.parse).parameters) == ["self", "data"]
        and list(inspect.signature(Parser.reset).parameters) == ["self"]
        and list(inspect.signature(Client._process_msg).parameters)[1:]
        == ["sid", "subject", "reply", "data", "headers"]
        and transport.supported()
    )
