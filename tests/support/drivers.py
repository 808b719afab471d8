"""The same options, in the names of each driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def options_for(driver: str, options: Mapping[str, Any]) -> dict[str, Any]:
    if driver != "obstore" or options.get("driver"):
        return dict(options)
    given, client, config = dict(options), options.get("client_kwargs", {}), options.get("config_kwargs", {})
    translated: dict[str, Any] = {"driver": "obstore"}
    for name, new in (("key", "access_key_id"), ("secret", "secret_access_key")):
        translated |= {f"{new}{end}": given[f"{name}{end}"] for end in ("", "_file") if f"{name}{end}" in given}
    if endpoint := given.get("endpoint_url") or client.get("endpoint_url"):
        translated |= {"endpoint": endpoint, "region": client.get("region_name", "us-east-1")}
    if connection := given.get("connection_string"):
        parts = dict(part.partition("=")[::2] for part in connection.split(";") if part)
        translated |= {"account_name": parts["AccountName"], "endpoint": parts["BlobEndpoint"]}
        translated |= {"account_key": parts["AccountKey"]} if "AccountKey" in parts else {}
        translated |= {"sas_key": parts["SharedAccessSignature"]} if "SharedAccessSignature" in parts else {}
    translated |= {name: given[name] for name in ("account_name", "account_key") if name in given}
    timeouts = {"connect_timeout": config.get("connect_timeout") or given.get("connection_timeout")}
    timeouts |= {"timeout": config.get("read_timeout") or given.get("read_timeout")}
    translated["client_options"] = {name: f"{value}s" for name, value in timeouts.items() if value}
    if config.get("retries"):
        translated["retry_config"] = {"max_retries": 0}
    return translated
