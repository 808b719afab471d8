"""What servers and users prove their identity with: keys, certificates, and the tokens of a decentralised setup."""

from __future__ import annotations

import base64
import datetime as dt
import ipaddress
import json
import os
from pathlib import Path
from typing import Any

import nkeys
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def seed_of(prefix: bytes) -> tuple[str, str]:
    seed = nkeys.encode_seed(os.urandom(32), prefix)
    pair = nkeys.from_seed(bytearray(seed))
    return seed.decode(), pair.public_key.decode()


def certificate(
    directory: Path, name: str, issuer: tuple[Any, Any] | None, *, host: str = "127.0.0.1", age: float = 0
) -> tuple[Any, Any]:
    """Write `name`.pem and `name`-key.pem: an authority without `issuer`, else a leaf for the address `host`.

    It is valid for an hour, which began `age` hours ago.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC) - dt.timedelta(hours=age)
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
        address = x509.IPAddress(ipaddress.ip_address(host))
        builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
    signed = builder.sign(issuer[1] if issuer else key, hashes.SHA256())
    (directory / f"{name}.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    (directory / f"{name}-key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return signed, key


def decentralised(directory: Path) -> str:
    """Write `user.creds`; the configuration of a server that knows the operator and lets the user in."""
    operator, operator_key = seed_of(nkeys.PREFIX_BYTE_OPERATOR)
    _, system_key = seed_of(nkeys.PREFIX_BYTE_ACCOUNT)
    account, account_key = seed_of(nkeys.PREFIX_BYTE_ACCOUNT)
    user, user_key = seed_of(nkeys.PREFIX_BYTE_USER)
    unlimited = dict.fromkeys(
        ("subs", "data", "payload", "imports", "exports", "conn", "leaf", "mem_storage", "disk_storage", "streams"), -1
    )
    limits = {**unlimited, "consumer": -1, "wildcards": True}
    operators = {"type": "operator", "version": 2, "system_account": system_key}
    accounts = {
        system_key: token(operator, system_key, {"type": "account", "version": 2, "limits": {"subs": -1, "conn": -1}}),
        account_key: token(operator, account_key, {"type": "account", "version": 2, "limits": limits}),
    }
    mine = token(account, user_key, {"type": "user", "version": 2, "subs": -1, "data": -1, "payload": -1})
    (directory / "user.creds").write_text(
        f"-----BEGIN NATS USER JWT-----\n{mine}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user}\n------END USER NKEY SEED------\n"
    )
    preload = "\n".join(f"{key}: {value}" for key, value in accounts.items())
    return (
        f"operator: {token(operator, operator_key, operators)}\nsystem_account: {system_key}\n"
        f"resolver: MEMORY\nresolver_preload: {{\n{preload}\n}}"
    )


def token(seed: str, subject: str, claims: dict[str, Any]) -> str:
    pair = nkeys.from_seed(bytearray(seed.encode()))
    header = {"typ": "JWT", "alg": "ed25519-nkey"}
    body = {"iat": 1, "iss": pair.public_key.decode(), "name": subject[:1], "sub": subject, "nats": claims}
    signed = ".".join(_base64(json.dumps(part).encode()) for part in (header, body))
    return f"{signed}.{_base64(pair.sign(signed.encode()))}"


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
