"""Every way to log in to NATS, and TLS, against servers that insist on it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import nkeys
import pytest

from jetcapture_py.config.model import NatsConfig
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.connection import connect
from tests.support.credentials import certificate, decentralised, seed_of
from tests.support.nats_server import NatsServer
from tests.support.ports import free_port

Start = Callable[..., NatsServer]


def login(server: NatsServer, scheme: str = "nats", **section: Any) -> None:
    async def connect_and_close() -> None:
        servers = [server.url.replace("nats://", f"{scheme}://")]
        client = await connect(NatsConfig.model_validate({"servers": servers, **section}), "test", timeout=0.5)
        await client.flush()
        await client.close()

    asyncio.run(connect_and_close())


def test_every_login_is_accepted_and_a_wrong_one_refused_in_one_line(nats_server: Start, tmp_path: Path) -> None:
    def file(name: str, text: str = "") -> str:
        if text:
            (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    seed, public = seed_of(nkeys.PREFIX_BYTE_USER)
    other, _ = seed_of(nkeys.PREFIX_BYTE_USER)
    operator, creds = decentralised(tmp_path), (tmp_path / "user.creds").read_text()
    jwt, of_jwt = re.findall(r"BEGIN.*\n(.+)", creds)
    password, token = "authorization { user: app, password: s3cret }", 'authorization { token: "t0ken" }'
    nkey = f"authorization {{ users: [ {{ nkey: {public} }} ] }}"
    refused, no_seed = "NATS refused the connection: ", "not the seed of an NKey"
    rows: tuple[tuple[str, dict[str, str], str], ...] = (
        (password, {"user": "app", "password": "s3cret"}, ""),
        (password, {"user": "app", "password_file": file("password", "s3cret\n")}, ""),
        (password, {"user": "app", "password": "wrong"}, f"{refused}Authorization Violation"),
        (password, {"user": "app", "password_file": file("missing")}, r"nats\.password_file: cannot read"),
        (token, {"token": "t0ken"}, ""),
        (token, {"token_file": file("token", "t0ken")}, ""),
        (token, {"token": "other"}, refused),
        (nkey, {"nkey_seed": seed}, ""),
        (nkey, {"nkey_seed_file": file("seed", f"{seed}\n")}, ""),
        (nkey, {"nkey_seed": other}, refused),
        (nkey, {"nkey_seed": "SUAB"}, rf"nats\.nkey_seed: {no_seed}"),
        (nkey, {"nkey_seed": seed[:-3]}, rf"nats\.nkey_seed: {no_seed}"),
        (operator, {"creds": file("user.creds")}, ""),
        (operator, {"creds": file("wrong.creds", creds[:-60])}, r"wrong\.creds does not hold a user's JWT and seed"),
        (operator, {"user_jwt": jwt, "user_seed": of_jwt}, ""),
        (operator, {"user_jwt": jwt, "user_seed": "hunter2"}, rf"nats\.user_seed: {no_seed}"),
        (operator, {"user_jwt": jwt}, refused),  # not a bearer token
        (operator, {}, refused),
    )
    servers = {settings: nats_server(settings) for settings in (password, token, nkey, operator)}
    for settings, section, error in rows:
        with pytest.raises(SourceError, match=error) if error else contextlib.nullcontext():
            login(servers[settings], **section)


def test_tls_is_verified_and_a_client_certificate_is_shown(nats_server: Start, tmp_path: Path) -> None:
    issue(tmp_path)
    server = nats_server(secured(tmp_path, "verify: true"))
    ca, pair = str(tmp_path / "ca.pem"), {"cert": str(tmp_path / "client.pem"), "key": str(tmp_path / "client-key.pem")}
    login(server, "tls", tls={"ca": ca, **pair})
    with pytest.raises(SourceError, match="certificate verify failed"):
        login(server, "tls", tls=pair)
    with pytest.raises(SourceError):
        login(server, "tls", tls={"ca": ca})
    login(nats_server(secured(tmp_path, "handshake_first: true")), "tls", tls={"ca": ca, "handshake_first": True})
    plain = nats_server("authorization { user: app, password: s3cret }")
    with pytest.raises(SourceError, match="TLS is configured, but the server does not offer it"):
        login(plain, user="app", password="s3cret", tls={})


def issue(directory: Path) -> None:
    authority = certificate(directory, "ca", None)
    certificate(directory, "server", authority)
    certificate(directory, "client", authority)


def secured(directory: Path, more: str = "verify: false") -> str:
    pair = f'cert_file: "{directory}/server.pem", key_file: "{directory}/server-key.pem"'
    return f'tls {{ {more}, {pair}, ca_file: "{directory}/ca.pem" }}'


@contextlib.asynccontextmanager
async def reconnecting(server: NatsServer, settings: dict[str, Any], *errors: str) -> AsyncIterator[asyncio.Event]:
    """Connect; yield an event that an error with one of these texts sets; at exit, wait for a working reconnect."""
    refused, reconnected = asyncio.Event(), asyncio.Event()

    async def failed(error: Exception) -> None:
        if any(text in str(error) for text in errors):
            refused.set()

    async def connected() -> None:
        reconnected.set()

    config = NatsConfig.model_validate({"servers": [server.url], **settings})
    client = await connect(config, "test", timeout=10, on_reconnected=connected, on_error=failed)
    async with asyncio.timeout(120):
        yield refused
        await reconnected.wait()
        await client.flush()
    assert not client.is_closed
    await client.close()


async def restart(server: NatsServer) -> None:
    await asyncio.to_thread(server.stop)
    await asyncio.to_thread(server.start)


async def rotate(server: NatsServer, settings: dict[str, Any], changed: str, replace: Callable[[], object]) -> None:
    """Restart the server with other settings; once it refuses the client, replace the client's files."""
    async with reconnecting(server, settings, "Authorization Violation", "certificate verify failed") as refused:
        server.extra_config = changed
        await restart(server)
        await refused.wait()
        replace()


@pytest.mark.filterwarnings("ignore:parameter 'timeout':DeprecationWarning")  # nats-py's use of aiohttp
@pytest.mark.parametrize("scheme", ["nats", "wss"])
async def test_a_secret_that_changes_is_read_again(nats_server: Start, tmp_path: Path, scheme: str) -> None:
    issue(tmp_path)
    secret, address = tmp_path / "secret", f"127.0.0.1:{free_port()}"
    websocket = f'websocket {{ listen: "{address}", {secured(tmp_path)} }}\n' if scheme == "wss" else ""
    served = "authorization {{ user: app, password: {} }}".format
    secret.write_text("first")
    server = nats_server(websocket + served("first"))
    settings: dict[str, Any] = {"user": "app", "password_file": str(secret)}
    if scheme == "wss":
        settings |= {"servers": [f"wss://{address}"], "tls": {"ca": str(tmp_path / "ca.pem")}}
    await rotate(server, settings, websocket + served("second"), lambda: secret.write_text("second"))


async def test_a_credentials_file_that_is_half_written_is_read_again(nats_server: Start, tmp_path: Path) -> None:
    server, file = nats_server(decentralised(tmp_path)), tmp_path / "user.creds"
    whole = file.read_bytes()
    async with reconnecting(server, {"creds": str(file)}, "does not hold a user's JWT and seed") as refused:
        file.write_bytes(whole[:-60])
        await restart(server)
        await refused.wait()
        file.write_bytes(whole)


async def test_a_connection_that_ends_with_a_new_token_reconnects(nats_server: Start, tmp_path: Path) -> None:
    server, secret = nats_server("authorization { token: first }"), tmp_path / "secret"
    secret.write_text("first")
    async with reconnecting(server, {"token_file": str(secret)}):
        secret.write_text("second")
        settings = server.store_dir / "server.conf"
        settings.write_text(settings.read_text().replace("first", "second"))
        os.kill(server.pid, signal.SIGHUP)


async def test_certificates_that_change_are_read_again(nats_server: Start, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        directory.mkdir()
        issue(directory)

    def replace() -> None:
        for file in ("ca.pem", "client.pem", "client-key.pem"):
            (second / file).rename(first / file)

    server = nats_server(secured(first, "verify: true"))
    tls = {"ca": f"{first}/ca.pem", "cert": f"{first}/client.pem", "key": f"{first}/client-key.pem"}
    await rotate(server, {"tls": tls}, secured(second, "verify: true"), replace)
