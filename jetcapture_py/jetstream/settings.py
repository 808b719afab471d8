"""Compare settings of streams and consumers as the JetStream API has them.

The server writes the same setting in several ways: what is not set is left out, or 0, or -1, or an empty list, and it
adds notes of its own to the metadata. Equivalent settings are not differences.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from jetcapture_py.config.units import RFC3339

_OWN_METADATA = "_nats."
"""Metadata that the server writes itself."""
_MEANS_NOTHING = {
    "compression": "none",
    "deliver_policy": "",
    "discard": "old",
    "persist_mode": "default",
    "priority_policy": "none",
    "replay_policy": "instant",
    "retention": "limits",
    "storage": "file",
    "src": ">",
}
"""Values of settings that are left out."""
_UNORDERED = frozenset({"subjects", "filter_subjects", "sources", "tags"})
_NO_TIME = "0001-01-01T00:00:00Z"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A setting whose value is not the wanted one; both as the API has them, None for left out."""

    name: str
    wanted: Any
    actual: Any


def differing(wanted: Mapping[str, Any], actual: Mapping[str, Any]) -> list[Difference]:
    """Compare the settings in `wanted` with the server's answer; settings that `wanted` lacks do not count.

    A change in the metadata is one difference for each name.
    """
    found = []
    for name, value in wanted.items():
        before = actual.get(name)
        if normal(name, value) == normal(name, before):
            continue
        if name == "metadata":
            new, old = normal(name, value) or {}, normal(name, before) or {}
            found += [
                Difference(name=f"metadata.{each}", wanted=new.get(each), actual=old.get(each))
                for each in sorted({**old, **new})
                if new.get(each) != old.get(each)
            ]
        else:
            found.append(Difference(name=name, wanted=value, actual=before))
    return found


def normal(name: str, value: Any) -> Any:
    """Return the value in the one way in which equal settings are equal; None for what is not set."""
    if isinstance(value, Mapping):
        if name == "metadata":
            return {each: text for each, text in value.items() if not each.startswith(_OWN_METADATA)} or None
        found = {each: normal(each, part) for each, part in value.items()}
        return {each: part for each, part in sorted(found.items()) if part is not None} or None
    if isinstance(value, list | tuple):
        parts = [normal("", part) for part in value]
        return (sorted(parts, key=json.dumps) if name in _UNORDERED else parts) or None
    if isinstance(value, str) and RFC3339.fullmatch(value):
        return None if value == _NO_TIME else utc(value)
    if value in (None, "", 0, -1, _MEANS_NOTHING.get(name)):  # False is 0
        return None
    return value


def utc(text: str) -> str:
    """Return a time of RFC 3339 in UTC, with no more digits than it needs."""
    match = RFC3339.fullmatch(text)
    if match is None:
        return text
    moment = datetime.fromisoformat(f"{match[1]}{match[3]}".upper()).astimezone(UTC)
    fraction = (match[2] or "").rstrip("0").rstrip(".")
    return f"{moment:%Y-%m-%dT%H:%M:%S}{fraction}Z"
