"""Connect to NATS: authentication, TLS, clear errors at the start, and endless reconnecting afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import ssl
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nats.errors
from nats.aio.client import RawCredentials
from pydantic import SecretStr

from jetcapture_py.config.model import NatsConfig
from jetcapture_py.errors import (
    ApiError,
    ConfigError,
    MissingConsumerError,
    MissingError,
    MissingMessageError,
    MissingStreamError,
    SourceError,
    UnavailableError,
)
from jetcapture_py.jetstream.wire.client import NATS_PY, Connection, Hook

PING_INTERVAL = 20
"""Seconds between pings. After three without an answer the connection is closed, so within a minute."""

_JWT = re.compile(r"BEGIN NATS USER JWT-+\s+\S+")
_SEED = re.compile(r"BEGIN USER NKEY SEED-+\s+(\S+)")
_CREDENTIALS = """-----BEGIN NATS USER JWT-----
{jwt}
------END NATS USER JWT------

-----BEGIN USER NKEY SEED-----
{seed}
------END USER NKEY SEED------
"""
_REFUSED = ("authorization", "authentication", "account")
_API_TIMEOUT = 5.0
_AGAIN = 0.25
_NOT_FOUND = 404
_MISSING = {10014: MissingConsumerError, 10037: MissingMessageError, 10059: MissingStreamError}
_TEMPORARILY_UNAVAILABLE = 10008

ErrorHook = Callable[[Exception], Awaitable[None]]


async def ignore(*_: object) -> None:
    """Ignore events of a connection: callers that wait for an answer notice."""


async def connect(
    config: NatsConfig,
    name: str,
    *,
    timeout: float,
    on_disconnected: Hook = ignore,
    on_reconnected: Hook = ignore,
    on_closed: Hook = ignore,
    on_error: ErrorHook = ignore,
) -> Connection:
    """Connect; unreachable servers are tried again for `timeout` seconds, a refusal is final.

    Once connected, reconnect attempts are unlimited, each with the current content of the files with password, token,
    credentials and certificates. Raises SourceError, and ConfigError for a missing extra or another nats-py.
    """
    _check_version()
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    options = _options(config)
    while True:
        problem: list[Exception] = []

        async def record(error: Exception, problem: list[Exception] = problem) -> None:
            problem.append(error)

        client = Connection(require_tls=_wants_tls(config), renew=_renewals(config, options))
        try:
            await client.connect(
                **options,
                name=name,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                connect_timeout=5,
                ping_interval=PING_INTERVAL,
                error_cb=record,
            )
            break
        except (OSError, nats.errors.Error, TimeoutError) as error:
            with contextlib.suppress(OSError, nats.errors.Error, TimeoutError):
                await asyncio.wait_for(client.close(), 1)  # after a failed TLS handshake it may never end
            reason = reason_of(problem[-1] if isinstance(error, nats.errors.NoServersError) and problem else error)
            if is_refusal(reason) or isinstance(error, ssl.SSLCertVerificationError):
                raise SourceError(f"NATS refused the connection: {reason}") from error
            if loop.time() >= deadline:
                where = ", ".join(config.servers)
                raise SourceError(f"cannot connect to NATS at {where}: {reason}") from error
            await asyncio.sleep(min(0.5, max(0.0, deadline - loop.time())))
    client.watch(on_disconnected, on_reconnected, on_closed, on_error)
    client.options.update(allow_reconnect=True, max_reconnect_attempts=-1, reconnect_time_wait=1)
    pool = {server.uri.netloc for server in client.server_pool}
    missing = [url for url in config.servers if url.split("://", 1)[1] not in pool]
    client.set_server_pool([server.uri.geturl() for server in client.server_pool] + missing)
    return client


def reason_of(error: Exception) -> str:
    """Return why a connection failed, without the client's decoration."""
    if isinstance(error, TimeoutError) and not str(error):
        return "no answer in time"
    if isinstance(error, nats.errors.NoServersError):
        return "no server is reachable"
    return " ".join(str(error).split()).removeprefix("nats: ").strip("'") or type(error).__name__


def is_refusal(reason: str) -> bool:
    """Whether a connection failed because the server did not accept the login."""
    return any(word in reason.lower() for word in _REFUSED)


def _check_version() -> None:
    """Refuse a nats-py whose internals are unknown. Raises ConfigError."""
    if not (installed := version("nats-py")).startswith(NATS_PY):
        raise ConfigError(f"nats-py {installed} is not supported: pip install 'nats-py[nkeys]>=2.15,<2.17'")


def _wants_tls(config: NatsConfig) -> bool:
    return config.tls is not None or any(url.startswith(("tls://", "wss://")) for url in config.servers)


def _options(config: NatsConfig) -> dict[str, Any]:
    if config.has_websockets and find_spec("aiohttp") is None:
        raise ConfigError("nats.servers: ws:// and wss:// need aiohttp: pip install 'jetcapture[websocket]'")
    options: dict[str, Any] = {"servers": list(config.servers), "inbox_prefix": config.inbox_prefix}
    options |= _login(config)
    if _wants_tls(config):
        options["tls"] = _tls(config)
        options["tls_handshake_first"] = bool(config.tls and config.tls.handshake_first)
    return options


def _login(config: NatsConfig) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if config.user is not None:
        options["user"] = config.user
        options["password"] = _secret(config.password, config.password_file, "nats.password_file")
    elif config.token is not None or config.token_file is not None:
        options["token"] = _secret(config.token, config.token_file, "nats.token_file")
    elif config.creds is not None:
        options["user_credentials"] = RawCredentials(_credentials(config.creds))
    elif config.nkey_seed is not None or config.nkey_seed_file is not None:
        options["nkeys_seed_str"] = _secret(config.nkey_seed, config.nkey_seed_file, "nats.nkey_seed_file")
        if not _is_seed(options["nkeys_seed_str"]):
            raise SourceError("nats.nkey_seed: not the seed of an NKey")
    elif config.user_jwt is not None:
        options |= _jwt_login(config.user_jwt.get_secret_value(), config.user_seed)
    return options


def _renewals(config: NatsConfig, options: Mapping[str, Any]) -> Iterator[Callable[[], Mapping[str, Any]]]:
    """Yield functions that re-read files: password, token, credentials and certificates."""

    def credentials(file: Path) -> dict[str, Any]:
        options["user_credentials"].data = _credentials(file)  # nats-py reads it at each attempt
        return {}

    if config.creds is not None:
        yield partial(credentials, config.creds)
    if config.password_file is not None or config.token_file is not None:
        yield lambda: _login(config)
    if config.tls is not None:
        yield lambda: {"tls": _tls(config)}


def _credentials(file: Path) -> str:
    """Return the content of a complete credentials file; on an incomplete one, nats-py may never return."""
    text = _secret(None, file, "nats.creds")
    seed = _SEED.search(text)
    if seed is None or not _JWT.search(text) or not _is_seed(seed[1]):
        raise SourceError(f"nats.creds: {file} does not hold a user's JWT and seed")
    return text


def _secret(value: SecretStr | None, file: Any, path: str) -> str:
    if value is not None:
        return value.get_secret_value()
    try:
        return str(file.read_text().strip())
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path}: cannot read {file}") from error


def _jwt_login(jwt: str, seed: SecretStr | None) -> dict[str, Any]:
    """Log in with a JWT. Without a seed it is a bearer token, and nothing is signed."""
    if seed is None:
        return {"user_jwt_cb": lambda: bytearray(jwt.encode()), "signature_cb": lambda _: b""}
    if not _is_seed(seed.get_secret_value()):
        raise SourceError("nats.user_seed: not the seed of an NKey")
    return {"user_credentials": RawCredentials(_CREDENTIALS.format(jwt=jwt, seed=seed.get_secret_value()))}


def _is_seed(text: str) -> bool:
    """Return True if nats-py can use the seed. For an invalid one it raises all kinds of exceptions."""
    import nkeys

    try:
        nkeys.from_seed(bytearray(text.encode()))
    except (nkeys.NkeysError, ValueError):
        return False
    return True


def _tls(config: NatsConfig) -> ssl.SSLContext:
    section = config.tls
    try:
        context = ssl.create_default_context(cafile=str(section.ca) if section and section.ca else None)
        if section and section.cert and section.key:
            context.load_cert_chain(str(section.cert), str(section.key))
    except (OSError, ssl.SSLError) as error:
        raise SourceError(f"nats.tls: cannot use the certificate files: {error}") from error
    return context


class Api:
    """The JetStream API as JSON, because nats-py's classes lack fields and update silently."""

    def __init__(self, client: Connection, config: NatsConfig) -> None:
        self._client = client
        self.prefix = config.js_api
        self.imported = config.api_prefix is not None
        """Whether requests probably cross accounts."""
        self.subjects = (f"{config.inbox_prefix}.*.>", "$JS.ACK.>", "$JS.API.>", f"{self.prefix}.>")
        """Subjects of deliveries, which have two tokens after the prefix, acknowledgements and requests."""

    async def pull(
        self,
        stream: str,
        consumer: str,
        reply: str,
        *,
        batch: int,
        max_bytes: int,
        expires: float,
        heartbeat: float,
        group: str = "",
        pin: str = "",
    ) -> None:
        """Request the next messages (ADR-13); they and statuses are sent to `reply`. Times are in seconds.

        `max_bytes` 0 sets no limit, which is allowed even if the consumer limits a pull's bytes. `group` is the
        consumer's priority group and `pin` the id that pins it to this client (ADR-42), "" for none.
        """
        body = b'{"batch":%d,"max_bytes":%d,"expires":%d,"idle_heartbeat":%d%s%s}' % (
            batch,
            max_bytes,
            int(expires * 1e9),
            int(heartbeat * 1e9),
            b',"group":"%s"' % group.encode() if group else b"",
            b',"id":"%s"' % pin.encode() if pin else b"",
        )
        head = f"PUB {self.prefix}.CONSUMER.MSG.NEXT.{stream}.{consumer} {reply} {len(body)}\r\n"
        await self._client.write(head.encode() + body + b"\r\n")

    async def request(self, subject: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Ask `{prefix}.{subject}`. Raises `ApiError`, or `UnavailableError` without an answer.

        A cluster that elects a leader may answer that it is temporarily unavailable; the request is then repeated.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _API_TIMEOUT
        while True:
            try:
                return await self._request(subject, body)
            except ApiError as error:
                if error.err_code != _TEMPORARILY_UNAVAILABLE:
                    raise
                if loop.time() >= deadline:
                    raise UnavailableError(f"JetStream does not answer: {error}") from error
                await asyncio.sleep(_AGAIN)

    async def message(self, stream: str, **which: Any) -> dict[str, Any] | None:
        """Return one message in the API's form, from the stream's leader; None without such a message."""
        try:
            message: dict[str, Any] = (await self.request(f"STREAM.MSG.GET.{stream}", which))["message"]
        except MissingMessageError:
            return None
        return message

    async def next_match(self, stream: str, seq: int, subjects: Collection[str]) -> dict[str, Any] | None:
        """Return the first message on `subjects` (empty: all) from `seq` on; None without one."""
        messages = [await self.message(stream, seq=seq, next_by_subj=subject) for subject in subjects or (">",)]
        return min(filter(None, messages), key=lambda message: int(message["seq"]), default=None)

    async def _request(self, subject: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        payload = json.dumps(body).encode() if body is not None else b""
        try:
            message = await self._client.ask(f"{self.prefix}.{subject}", payload, _API_TIMEOUT)
        except nats.errors.NoRespondersError as error:
            raise UnavailableError("JetStream does not answer: it is not enabled, or has no leader") from error
        except (nats.errors.Error, TimeoutError) as error:
            raise UnavailableError(f"JetStream does not answer: {reason_of(error)}") from error
        answer: dict[str, Any] = json.loads(message.data)
        if "error" in answer:
            error_ = answer["error"]
            code, err_code = error_.get("code", 500), error_.get("err_code", 0)
            kind = _MISSING.get(err_code, MissingError if code == _NOT_FOUND else ApiError)
            raise kind(f"NATS refused: {error_.get('description', 'unknown')}", code, err_code)
        return answer
