"""How jobs and the data source log in to NATS: the settings of a capture's `nats` section, as flat options.

`servers` is a list with commas; `tls` is true or false, and what is in the `tls` section has `tls_` in front.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from jetcapture_py.config import NatsConfig, TlsConfig
from jetcapture_py.config_errors import problems
from jetcapture_py.errors import ConfigError

OPTIONS = (
    *(name for name in NatsConfig.model_fields if name != "tls"),
    "tls",
    *(f"tls_{name}" for name in TlsConfig.model_fields),
)
"""Every option's name."""


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
