"""How jobs and the data source log in to NATS: the settings of a capture's `nats` section, as flat options.

`servers` is a list with commas; `tls` is true or false, and what is in the `tls` section has `tls_` in front. On a
command line a secret is named by its file, or comes from the environment, because everybody sees a command line.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from pydantic import ValidationError

from jetcapture_py.config.messages import problems
from jetcapture_py.config.model import NatsConfig, TlsConfig
from jetcapture_py.errors import ConfigError

OPTIONS = (
    *(name for name in NatsConfig.model_fields if name != "tls"),
    "tls",
    *(f"tls_{name}" for name in TlsConfig.model_fields),
)
"""Every option's name."""
SECRETS = {"password": "NATS_PASSWORD", "token": "NATS_TOKEN", "nkey_seed": "NATS_NKEY_SEED"}
"""Options that are no command line arguments, and the environment variables that stand for them."""

_SWITCHES = ("tls", "tls_handshake_first")
_FILES = ("password_file", "token_file", "creds", "nkey_seed_file", "tls_ca", "tls_cert", "tls_key")


def nats_config(options: Mapping[str, str | None]) -> NatsConfig:
    """The login that `options` describe; those that are no login are left alone. Raises ConfigError."""
    given = {name: value for name in OPTIONS if (value := options.get(name)) is not None}
    data: dict[str, Any] = {name: value for name, value in given.items() if not name.startswith("tls")}
    if "servers" in data:
        data["servers"] = [server.strip() for server in given["servers"].split(",")]
    tls = {name.removeprefix("tls_"): value for name, value in given.items() if name.startswith("tls_")}
    if tls or given.get("tls", "false").lower() == "true":
        data["tls"] = tls
    try:
        return NatsConfig.model_validate(data)
    except ValidationError as error:
        found = [line.replace("tls.", "tls_", 1) for line in problems(error, NatsConfig)]
    raise ConfigError(*found)  # outside of the handler: the validation error holds the secrets


def login_at(servers: str | Sequence[str]) -> NatsConfig:
    """The login of these addresses, which may have `user:password@` or `token@` in them. Raises ConfigError."""
    options: dict[str, str | None] = {}
    addresses = []
    for address in [servers] if isinstance(servers, str) else servers:
        scheme, separator, rest = address.partition("://")
        who, _, host = rest.rpartition("@")
        user, colon, password = who.partition(":")
        if who:
            options |= {"user": unquote(user), "password": unquote(password)} if colon else {"token": unquote(user)}
        addresses.append(f"{scheme}{separator}{host}")
    return nats_config(options | {"servers": ",".join(addresses)})


def login_arguments(parser: argparse.ArgumentParser) -> None:
    """Where to publish, and how to log in there; `login` reads it."""
    group = parser.add_argument_group(
        "NATS",
        "Files are read where the job runs, so on every executor. Secrets are files, or "
        f"{', '.join(SECRETS.values())} in the environment.",
    )
    group.add_argument("--servers", action="append", metavar="URL", help="may be repeated; default: those of --config")
    for name in OPTIONS:
        if name == "servers" or name in SECRETS:
            continue
        tls = name.startswith("tls_")
        field = TlsConfig.model_fields[name.removeprefix("tls_")] if tls else NatsConfig.model_fields[name]
        if name in _SWITCHES:
            group.add_argument(_flag(name), action="store_const", const="true", help=field.description)
        else:
            metavar = "FILE" if name in _FILES else name.upper()
            group.add_argument(_flag(name), metavar=metavar, help=field.description)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def login(chosen: argparse.Namespace, env: Mapping[str, str] = os.environ) -> NatsConfig:
    """The login that the arguments describe, or the one of `--config` when no servers are named. Raises ConfigError."""
    given: dict[str, str | None] = {
        name: getattr(chosen, name) for name in OPTIONS if name not in (*SECRETS, "servers")
    }
    configured: NatsConfig | None = getattr(chosen, "nats", None)
    if chosen.servers is None:
        others = [_flag(name) for name, value in given.items() if value is not None]
        if configured is None:
            raise ConfigError("--servers: missing: where to publish; or --config, for the capture's own servers")
        if others:
            raise ConfigError(f"{others[0]}: only together with --servers; otherwise --config says how to log in")
        return configured
    given["servers"] = ",".join(chosen.servers)
    return nats_config(given | _secrets(given, env))


def _secrets(given: Mapping[str, str | None], env: Mapping[str, str]) -> dict[str, str | None]:
    """The secret of the environment, unless the arguments name another way to log in."""
    if given.get("user") is not None:
        return {} if given.get("password_file") is not None else {"password": env.get(SECRETS["password"])}
    if any(given.get(name) is not None for name in ("creds", "token_file", "nkey_seed_file")):
        return {}
    return {name: env.get(SECRETS[name]) or None for name in ("token", "nkey_seed")}
