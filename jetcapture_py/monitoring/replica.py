"""Ask the replica that listens on this machine for its facts."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

from jetcapture_py.config.model import Config

TIMEOUT = 2.0
MAX_BYTES = 8 << 20
_ANY = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  addresses to ask, not to listen on


def ask_replica(config: Config) -> dict[str, Any] | None:
    """Return the facts of a replica of this capture at `http.listen`; None if none answers there.

    Something else may listen there, so the answer is not trusted to be ours before it names the stream and consumer.
    """
    if config.http is None:
        return None
    address = urlsplit(f"//{config.http.listen}")
    host = address.hostname or ""
    connection = http.client.HTTPConnection(_ANY.get(host, host), address.port or 80, timeout=TIMEOUT)
    try:
        connection.request("GET", "/status.json")
        answer = connection.getresponse()
        found = json.loads(answer.read(MAX_BYTES)) if answer.status == 200 else {}
        return next((each for each in found["captures"] if _is_ours(each, config)), None)
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, RecursionError):
        return None
    finally:
        connection.close()


def _is_ours(facts: Any, config: Config) -> bool:
    return bool(facts["stream"] == config.source.stream and facts["consumer"] == config.source.consumer)
