"""NATS login of the data source: the settings of a capture's `nats` section as flat options.

`servers` is comma-separated; `tls` is true or false, and the settings of the `tls` section start with `tls_`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jetcapture_py.config.model import NatsConfig, TlsConfig
from jetcapture_py.config.nats import without_login
from jetcapture_py.config.section import validated

OPTIONS = (
    *(name for name in NatsConfig.model_fields if name != "tls"),
    "tls",
    *(f"tls_{name}" for name in TlsConfig.model_fields),
)
"""Names of all options."""


def nats_config(options: Mapping[str, str | None]) -> NatsConfig:
    """Parse the login options; ignore others. Raises ConfigError."""
    given = {name: value for name in OPTIONS if (value := options.get(name)) is not None}
    data: dict[str, Any] = {name: value for name, value in given.items() if not name.startswith("tls")}
    if "servers" in data:
        data["servers"] = [server.strip() for server in given["servers"].split(",")]
    tls = {name.removeprefix("tls_"): value for name, value in given.items() if name.startswith("tls_")}
    if tls or given.get("tls", "false").lower() == "true":
        data["tls"] = tls
    return validated(NatsConfig, data, rename=lambda line: line.replace("tls.", "tls_", 1))


def login_at(servers: str | Sequence[str] | NatsConfig) -> NatsConfig:
    """Parse addresses, which may contain `user:password@` or `token@`, into a login. Raises ConfigError."""
    if isinstance(servers, NatsConfig):
        return servers
    pairs = [without_login(address) for address in ([servers] if isinstance(servers, str) else servers)]
    options: dict[str, str | None] = {"servers": ",".join(address for address, _ in pairs)}
    for _, login in pairs:
        options |= login
    return nats_config(options)
