"""Requirements of `source.mode: ordered` on the server, the stream and the consumer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MIN_VERSION, MIN_IMPORTED = (2, 14), (2, 14, 4)
"""Earlier servers do not pass the answer to CONSUMER.RESET from one account to another."""
GROUP = "jetcapture"
"""The consumer's priority group."""
TAKEOVER_S = 1.0
"""Default of `source.takeover`."""
ACK_WAIT_S = 24 * 3600.0
"""Long, because a RESET redelivers lost messages, and nothing has to be kept alive."""
_NANOSECOND = 1_000_000_000


def settings(takeover: float | None) -> dict[str, Any]:
    """Return the consumer's API settings that differ from the shared mode."""
    return {
        "ack_policy": "all",
        "ack_wait": round(ACK_WAIT_S * _NANOSECOND),
        "priority_policy": "pinned_client",
        "priority_groups": [GROUP],
        "priority_timeout": round((takeover or TAKEOVER_S) * _NANOSECOND),
    }


def is_ordered(config: Mapping[str, Any]) -> bool:
    """Whether a consumer with this API configuration suits this mode."""
    pinned = config.get("priority_policy") == "pinned_client" and GROUP in (config.get("priority_groups") or ())
    return pinned and config.get("ack_policy") == "all"


def unusable(config: Mapping[str, Any]) -> str | None:
    """Return the problem of a consumer with this configuration; None without one."""
    if not is_ordered(config):
        return "is not one for source.mode ordered; use another consumer (`jetcapture apply` says how)"
    if config.get("max_deliver", -1) > 0:
        return f"has max_deliver {config['max_deliver']}; with source.mode ordered it must be unlimited"
    return None


def too_old(version: str, *, imported: bool = False) -> str | None:
    """Return why a server of this version cannot be used, or not through an imported API; None if it can."""
    number = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if number >= (MIN_IMPORTED if imported else MIN_VERSION):
        return None
    needed = "2.14.4 or newer with nats.api_prefix" if imported else "2.14 or newer"
    return f"source.mode ordered needs nats-server {needed}, this is {version}; use source.mode shared"


def unsuitable(stream: Mapping[str, Any]) -> str | None:
    """Return why a stream with this API configuration cannot be used; None if it can.

    If an unacknowledged message is removed from the stream, the server acknowledges it itself, and with
    `ack_policy: all` every earlier message, stored or not (nats-server 2.15.1).
    """
    if stream.get("retention") == "workqueue":
        return "a work queue needs an acknowledgement for each message, which is source.mode shared, not ordered"
    wanted = [name for name in ("deny_delete", "deny_purge") if not stream.get(name)]
    wanted += [
        f"no {name}" for name in ("allow_msg_ttl", "allow_rollup_hdrs", "allow_msg_schedules") if stream.get(name)
    ]
    wanted += ["no max_msgs_per_subject"] if stream.get("max_msgs_per_subject", -1) > 0 else []
    if not wanted:
        return None
    reason = "needs a stream from which messages are only removed at its beginning"
    return f"source.mode ordered {reason} ({', '.join(wanted)}); use source.mode shared"
