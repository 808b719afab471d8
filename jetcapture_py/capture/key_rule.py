"""Warn if the rule for keys and buckets differs from that of the last stored object.

All copies of a message are under one key and bucket as long as the rule stays the same. Copies of messages in flight
during a change may not be, and then only full deduplication drops them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jetcapture_py import plugins
from jetcapture_py.archive import footer, layout
from jetcapture_py.archive.writer import Encoder
from jetcapture_py.config.decoding import DecodeConfig
from jetcapture_py.config.template import parse_template
from jetcapture_py.config.units import format_duration
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.log import event
from jetcapture_py.store import NoteStore, ObjectReader, read_watermark, users_errors
from jetcapture_py.transform.decode import parse_type
from jetcapture_py.transform.keys import KeyFunction

if TYPE_CHECKING:
    from jetcapture_py.capture.state import CaptureState
    from jetcapture_py.config.model import BlockConfig
    from jetcapture_py.transform.batch import Decoder

log = logging.getLogger("jetcapture.capture")

TIMEOUT = 5.0
"""Seconds that a start waits for the store's answer about the last object."""
ADVICE = 'messages in flight may be stored under two keys or buckets; read them with dedupe="full", or --dedupe full'


def describe(template: str, decode: DecodeConfig, key: KeyFunction | None, decoder: Decoder | None) -> str:
    """Describe how keys are made: the template or the name of a function, and where the template's fields come from."""
    if key is not None:
        return _name(key)
    if plugins.is_reference(template):
        return template
    fields = dict.fromkeys(str(part.value) for part in parse_template(template) if part.kind == "field")
    if not fields:
        return template
    if decoder is not None or decode.format not in ("json", "msgpack"):
        return f"{template} (fields of {decode.format if decoder is None else _name(decoder)})"
    if not decode.columns:
        return f"{template} (fields as sent)"
    return f"{template} ({', '.join(f'{field}: {_declared(field, decode)}' for field in fields)})"


def describe_time(block: BlockConfig) -> str:
    """Describe the time that buckets are made of: `timestamp`, `placed_at`, `header.X-At in ms, else timestamp`."""
    unit = f" in {block.time_unit}" if block.time_unit else ""
    return f"{block.time}{unit}{f', else {block.time_fallback}' if block.time_fallback else ''}"


def _name(code: Any) -> str:
    """Return `module:name` of a function, or of an object's class."""
    named = code if hasattr(code, "__qualname__") else type(code)
    return f"{named.__module__}:{named.__qualname__}"


def _declared(field: str, decode: DecodeConfig) -> str:
    """Describe the declared column that a template's field is taken from."""
    stored = {layout.field_name(name): column for name, column in decode.columns.items()}
    head = field.split(".")[0]
    for name in (field, layout.field_name(field), layout.field_name(head)):
        if (column := stored.get(name)) is not None:
            parts = [
                str(parse_type(column.type)),
                column.unit and f"in {column.unit}",
                column.path and f"at {column.path}",
            ]
            return " ".join(part for part in parts if part)
    return "none"


async def warn_of_change(state: CaptureState, encoder: Encoder) -> None:
    """Log a warning if the object stored last has another rule than the configuration.

    Silent if that is unknown: a capture needs no permission to read objects.
    """
    try:
        async with asyncio.timeout(TIMEOUT):
            found = await state.in_thread(state.store_threads, _last, state.store, state.config.source.stream)
    except (JetcaptureError, TimeoutError) as error:
        event(log, logging.DEBUG, "rule.unknown", error=error)
        return
    if found is not None and (fields := changes(found[1], encoder)):
        event(log, logging.WARNING, "rule.changed", **fields, object=found[0], advice=ADVICE)


def changes(stored: Mapping[str, str], now: Encoder) -> dict[str, str]:
    """Compare the rule in an object's footer with the encoder's: what it was and what it is, where that differs."""
    found: dict[str, str] = {}
    if (before := stored.get("key_rule")) is not None and now.key_rule is not None and before != now.key_rule:
        found |= {"key_before": before, "key": now.key_rule}
    interval = stored.get("interval", "")
    if interval.isdecimal() and int(interval) != now.interval:
        found |= {"interval_before": format_duration(int(interval)), "interval": format_duration(now.interval)}
    time = stored.get("time", layout.STREAM_TIME)
    if stored and "quarantine" not in stored and time != now.time:
        found |= {"time_before": time, "time": now.time}
    return found


def _last(store: Any, stream: str) -> tuple[str, Mapping[str, str]] | None:
    """Read the footer of the object that the watermark says was stored last; its path and its entries.

    Raises JetcaptureError, whatever a store of the user raises.
    """
    if not (isinstance(store, NoteStore) and isinstance(store, ObjectReader)):
        return None
    mark = read_watermark(store, stream)
    if mark is None or mark.last_object is None:
        return None
    path = mark.last_object[0]
    name = layout.parse_path(path)
    if name is None or name.stream != stream or not name.parquet:
        return None
    with users_errors():
        return path, footer.read(lambda size: store.read_end(path, size))
