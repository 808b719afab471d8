"""Every way to log in to NATS, and TLS, against servers that insist on it."""

from __future__ import annotations

import asyncio
import datetime as dt
import ipaddress
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nkeys
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from jetcapture_py.config import NatsConfig
from jetcapture_py.connect import connect
from jetcapture_py.errors import SourceError
from tests.support.nats_server import NatsServer

Start = Callable[..., NatsServer]


async def login(**section: Any) -> bool:
    """Connect with these settings, and close."""

    async def ignore(*_: Any) -> None:
        """Nothing to do."""

    client = await connect(
        NatsConfig.model_validate(section),
        "test",
        on_disconnected=ignore,
        on_reconnected=ignore,
        on_closed=ignore,
        on_error=ignore,
        patience=0.5,
    )
    await client.flush()
    await client.close()
    return True


def seed_of(prefix: bytes) -> tuple[str, str]:
    """A new NKey: its seed and its public key."""
    seed = nkeys.encode_seed(os.urandom(32), prefix)
    pair = nkeys.from_seed(bytearray(seed))
    return seed.decode(), pair.public_key.decode()


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


def certificate(directory: Path, name: str, issuer: tuple[Any, Any] | None) -> tuple[Any, Any]:
    """Write `name`.pem and `name`-key.pem: an authority without `issuer`, else a leaf for 127.0.0.1."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer[0].subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(minutes=5))
        .not_valid_after(now + dt.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    if issuer:
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
    signed = builder.sign(issuer[1] if issuer else key, hashes.SHA256())
    (directory / f"{name}.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    (directory / f"{name}-key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return signed, key


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


def test_credentials_are_never_sent_in_the_clear_when_tls_is_configured(nats_server: Start) -> None:
    server = nats_server("authorization { user: app, password: s3cret }")
    with pytest.raises(SourceError, match="TLS is configured, but the server does not offer it"):
        asyncio.run(login(servers=[server.url], user="app", password="s3cret", tls={}))
