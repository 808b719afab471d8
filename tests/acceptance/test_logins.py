"""Every way to log in to NATS, and TLS, against servers that insist on it."""

from __future__ import annotations

import asyncio
import contextlib
import os
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


async def login(**section: Any) -> bool:
    """Connect with these settings, and close."""

    client = await connect(NatsConfig.model_validate(section), "test", timeout=0.5)
    await client.flush()
    await client.close()
    return True


def test_user_and_password_also_from_a_file(nats_server: Start, tmp_path: Path) -> None:
    server = nats_server("authorization { user: app, password: s3cret }")
    (tmp_path / "password").write_text("s3cret\n")
    assert asyncio.run(login(servers=[server.url], user="app", password="s3cret"))
    assert asyncio.run(login(servers=[server.url], user="app", password_file=str(tmp_path / "password")))
    with pytest.raises(SourceError, match="NATS refused the connection: Authorization Violation"):
        asyncio.run(login(servers=[server.url], user="app", password="wrong"))
    with pytest.raises(SourceError, match=r"nats\.password_file: cannot read"):
        asyncio.run(login(servers=[server.url], user="app", password_file=str(tmp_path / "missing")))


def test_a_token(nats_server: Start, tmp_path: Path) -> None:
    server = nats_server('authorization { token: "t0ken" }')
    (tmp_path / "token").write_text("t0ken")
    assert asyncio.run(login(servers=[server.url], token="t0ken"))
    assert asyncio.run(login(servers=[server.url], token_file=str(tmp_path / "token")))
    with pytest.raises(SourceError, match="refused"):
        asyncio.run(login(servers=[server.url], token="other"))


def test_an_nkey_seed(nats_server: Start, tmp_path: Path) -> None:
    seed, public = seed_of(nkeys.PREFIX_BYTE_USER)
    server = nats_server(f"authorization {{ users: [ {{ nkey: {public} }} ] }}")
    (tmp_path / "seed").write_text(seed + "\n")
    assert asyncio.run(login(servers=[server.url], nkey_seed=seed))
    assert asyncio.run(login(servers=[server.url], nkey_seed_file=str(tmp_path / "seed")))
    with pytest.raises(SourceError, match="refused"):
        asyncio.run(login(servers=[server.url], nkey_seed=seed_of(nkeys.PREFIX_BYTE_USER)[0]))
    for wrong in ("hunter2", "SUAB", seed[:-3]):
        with pytest.raises(SourceError, match=r"nats\.nkey_seed: not the seed of an NKey"):
            asyncio.run(login(servers=[server.url], nkey_seed=wrong))


def test_a_credentials_file(nats_server: Start, tmp_path: Path) -> None:
    server = nats_server(decentralised(tmp_path))
    assert asyncio.run(login(servers=[server.url], creds=str(tmp_path / "user.creds")))
    with pytest.raises(SourceError, match="refused"):
        asyncio.run(login(servers=[server.url]))
    for wrong in ("hunter2", (tmp_path / "user.creds").read_text()[:-60]):
        (tmp_path / "wrong.creds").write_text(wrong)
        with pytest.raises(SourceError, match=r"wrong\.creds does not hold a user's JWT and seed"):
            asyncio.run(login(servers=[server.url], creds=str(tmp_path / "wrong.creds")))


def test_a_jwt_and_its_seed(nats_server: Start, tmp_path: Path) -> None:
    server = nats_server(decentralised(tmp_path))
    lines = (tmp_path / "user.creds").read_text().splitlines()
    jwt, seed = (lines[index + 1] for index, line in enumerate(lines) if "BEGIN" in line)
    assert asyncio.run(login(servers=[server.url], user_jwt=jwt, user_seed=seed))
    with pytest.raises(SourceError, match="refused"):
        asyncio.run(login(servers=[server.url], user_jwt=jwt))  # not a bearer token
    with pytest.raises(SourceError, match=r"nats\.user_seed: not the seed of an NKey"):
        asyncio.run(login(servers=[server.url], user_jwt=jwt, user_seed="hunter2"))


def test_tls_is_verified_and_a_client_certificate_is_shown(nats_server: Start, tmp_path: Path) -> None:
    authority = certificate(tmp_path, "ca", None)
    certificate(tmp_path, "server", authority)
    certificate(tmp_path, "client", authority)
    server = nats_server(
        f'tls {{ cert_file: "{tmp_path}/server.pem", key_file: "{tmp_path}/server-key.pem", '
        f'ca_file: "{tmp_path}/ca.pem", verify: true }}'
    )
    address = server.url.replace("nats://", "tls://")
    ca, pair = str(tmp_path / "ca.pem"), {"cert": str(tmp_path / "client.pem"), "key": str(tmp_path / "client-key.pem")}
    assert asyncio.run(login(servers=[address], tls={"ca": ca, **pair}))
    with pytest.raises(SourceError, match="certificate verify failed"):
        asyncio.run(login(servers=[address], tls=pair))
    with pytest.raises(SourceError):
        asyncio.run(login(servers=[address], tls={"ca": ca}))


def test_tls_before_the_servers_first_word(nats_server: Start, tmp_path: Path) -> None:
    certificate(tmp_path, "server", certificate(tmp_path, "ca", None))
    server = nats_server(
        f'tls {{ cert_file: "{tmp_path}/server.pem", key_file: "{tmp_path}/server-key.pem", handshake_first: true }}'
    )
    tls = {"ca": str(tmp_path / "ca.pem"), "handshake_first": True}
    assert asyncio.run(login(servers=[server.url.replace("nats://", "tls://")], tls=tls))


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
    """Stop and start the server."""
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
def test_a_secret_that_changes_is_read_again(nats_server: Start, tmp_path: Path, scheme: str) -> None:
    certificate(tmp_path, "server", certificate(tmp_path, "ca", None))
    secret, address = tmp_path / "secret", f"127.0.0.1:{free_port()}"
    pair = f'tls {{ cert_file: "{tmp_path}/server.pem", key_file: "{tmp_path}/server-key.pem" }}'
    websocket = f'websocket {{ listen: "{address}", {pair} }}\n' if scheme == "wss" else ""

    def served(password: str) -> str:
        return f"{websocket}authorization {{ user: app, password: {password} }}"

    secret.write_text("first")
    server = nats_server(served("first"))
    settings: dict[str, Any] = {"user": "app", "password_file": str(secret)}
    if scheme == "wss":
        settings |= {"servers": [f"wss://{address}"], "tls": {"ca": str(tmp_path / "ca.pem")}}
    asyncio.run(rotate(server, settings, served("second"), lambda: secret.write_text("second")))


def test_a_secret_that_cannot_be_read_again_stays_as_it_was(nats_server: Start, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with reconnecting(server, {"user": "app", "password_file": str(secret)}, "cannot read") as reported:
            secret.unlink()
            await restart(server)
            await reported.wait()

    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    server = nats_server("authorization { user: app, password: s3cret }")
    asyncio.run(scenario())


def test_a_credentials_file_that_is_half_written_is_read_again(nats_server: Start, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with reconnecting(server, {"creds": str(file)}, "does not hold a user's JWT and seed") as refused:
            file.write_bytes(whole[:-60])
            await restart(server)
            await refused.wait()
            file.write_bytes(whole)

    server = nats_server(decentralised(tmp_path))
    file = tmp_path / "user.creds"
    whole = file.read_bytes()
    asyncio.run(scenario())


def test_a_connection_that_the_server_ends_with_a_new_token_reconnects(nats_server: Start, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with reconnecting(server, {"token_file": str(secret)}):
            secret.write_text("second")
            settings = server.store_dir / "server.conf"
            settings.write_text(settings.read_text().replace("first", "second"))
            os.kill(server.pid, signal.SIGHUP)

    secret = tmp_path / "secret"
    secret.write_text("first")
    server = nats_server("authorization { token: first }")
    asyncio.run(scenario())


def test_certificates_that_change_are_read_again(nats_server: Start, tmp_path: Path) -> None:
    def issue(name: str) -> str:
        (tmp_path / name).mkdir()
        authority = certificate(tmp_path / name, "ca", None)
        certificate(tmp_path / name, "server", authority)
        certificate(tmp_path / name, "client", authority)
        return (
            f'tls {{ cert_file: "{tmp_path}/{name}/server.pem", key_file: "{tmp_path}/{name}/server-key.pem", '
            f'ca_file: "{tmp_path}/{name}/ca.pem", verify: true }}'
        )

    def replace() -> None:
        for file in ("ca.pem", "client.pem", "client-key.pem"):
            (tmp_path / "second" / file).rename(tmp_path / "first" / file)

    server = nats_server(issue("first"))
    files = {"ca": "ca.pem", "cert": "client.pem", "key": "client-key.pem"}
    tls = {name: str(tmp_path / "first" / file) for name, file in files.items()}
    asyncio.run(rotate(server, {"tls": tls}, issue("second"), replace))


def test_credentials_are_never_sent_in_the_clear_when_tls_is_configured(nats_server: Start) -> None:
    server = nats_server("authorization { user: app, password: s3cret }")
    with pytest.raises(SourceError, match="TLS is configured, but the server does not offer it"):
        asyncio.run(login(servers=[server.url], user="app", password="s3cret", tls={}))
