"""The status as lines of text: what the server and the archive know, and what a replica on this machine adds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain
from typing import Any

from jetcapture_py.monitoring.status import CaptureStatus
from jetcapture_py.pages import words
from jetcapture_py.text import plural

MAX_LINES = 5
"""Lines of a list: open blocks, reasons, objects."""
_LEVELS = "▁▂▃▄▅▆▇█"
_CURVE = 45
"""Characters of a curve; each is the highest value of its part of the time."""

Trend = Mapping[str, Sequence[float]]
"""Values over time by name, oldest first."""


def lines(status: CaptureStatus | None, problem: str, replica: Mapping[str, Any] | None, trend: Trend) -> Iterator[str]:
    """Yield the lines; without `status`, `problem` says why. The replica's facts are those of /status.json."""
    if status is None:
        yield problem
    else:
        yield f"{status.stream} / {status.consumer} at {words.moment(status.time)} UTC"
        for name, value, meaning in status.lines():
            yield f"{name:<13}{value:<22}{meaning}".rstrip()
    if replica is not None:
        try:
            found = list(_replica(replica))
        except (LookupError, TypeError, ValueError, AttributeError):  # it may be of another version
            found = ["cannot read the replica's answer; it may run another version"]
        yield from chain([""], found)
    elif trend:
        yield ""
        for name, values in trend.items():
            yield f"{name:<13}{curve(values)}".rstrip()


def curve(values: Sequence[float], width: int = _CURVE) -> str:
    """Return values as a line of blocks, the highest one full, 0 the lowest."""
    if not values:
        return ""
    parts = [values[len(values) * at // width : len(values) * (at + 1) // width] for at in range(width)]
    bins = [max(part) for part in parts if part] if len(values) > width else list(values)
    top = max(bins)
    return "".join(_LEVELS[min(int(value / top * len(_LEVELS)), len(_LEVELS) - 1) if top > 0 else 0] for value in bins)


def _replica(facts: Mapping[str, Any]) -> Iterator[str]:
    now, samples = datetime.fromisoformat(facts["time"]), facts["samples"]
    yield f"this replica: {words.visible(facts['summary'])}; {words.visible(facts['host'])}, process {facts['pid']}"
    for notice in facts["notices"]:
        yield f"  {notice['level']}: {words.visible(notice['text'])} {words.visible(notice['action'])}".rstrip()
    figures = (
        ("received", samples["received"], words.rate),
        ("stored", samples["stored"], words.rate),
        ("lag", samples["lag"], words.age),
        ("pending", samples["pending"], words.short),
        ("unacked", samples["unacked"], words.short),
        ("memory", samples["memory"], words.size),
    )
    for name, values, show in figures:
        if values:
            shape = curve(values)
            yield f"{name:<13}{show(values[-1]):<14}{shape:<{_CURVE}}  15 min, at most {show(max(values))}"
    memory, limit = facts["memory"], facts["memory_limit"]
    yield f"{'memory':<13}{words.size(memory)} of {words.size(limit)}, {words.share(memory, limit)}"
    yield from _blocks(facts)
    for each in facts["objects"][:MAX_LINES]:
        ago = words.age((now - datetime.fromisoformat(each["acknowledged"])).total_seconds())
        figures_of = f"{each['rows']:,} rows, {words.size(each['bytes'])}"
        yield f"{'stored':<13}{ago + ' ago':<18}{figures_of:<26}{words.visible(each['location'], 4000)}"
    if facts["quarantined"]:
        messages = plural(facts["quarantined"], "message", grouped=True)
        yield f"{'quarantine':<13}{messages} since {words.moment(_time(facts['started']))} UTC"
        for each in facts["quarantine"][:MAX_LINES]:
            reason = f"{words.visible(each['stage'])}: {words.visible(each['error'])}"
            last = f"last: sequence {each['seq']:,}, {words.visible(each['subject'], 80)}"
            yield f"  {each['messages']:>9,}  {reason}; {last}"
    for each in facts["past"][:MAX_LINES]:
        began, ended = _time(each["began"]), _time(each["ended"])
        length = words.age((ended - began).total_seconds())
        yield f"{'earlier':<13}{words.clock(began, now)} for {length}: {words.visible(each['text'])}"


def _blocks(facts: Mapping[str, Any]) -> Iterator[str]:
    rows, size = facts["open_rows"], words.size(facts["open_bytes"])
    yield f"{'open blocks':<13}{facts['open_blocks']:,} of {facts['open_blocks_limit']:,}, {rows:,} rows, {size}"
    lists = [("oldest", facts["oldest"]), ("largest", facts["largest"])]
    for name, blocks in lists if facts["open_blocks"] > len(facts["oldest"]) else [("", facts["oldest"])]:
        for block in blocks[:MAX_LINES]:
            figures = f"{words.age(block['age']):<13}{block['rows']:>9,} rows  {words.size(block['bytes']):>10}"
            yield f"  {name:<9}{figures}  {_key(block)}"


def _key(block: Mapping[str, Any]) -> str:
    if block["quarantine"]:
        return "(quarantine)"
    if block["bundle"]:
        return f"bundle {words.visible(block['bundle'])}"
    return words.visible(block["key"], 80) if block["key"] else "(no key)"


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)
