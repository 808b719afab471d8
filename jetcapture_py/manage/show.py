"""Format settings of the JetStream API as in a configuration file, and changes as -old +new."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rich.text import Text

from jetcapture_py.config.stream import UNLIMITED
from jetcapture_py.config.units import format_nanoseconds, format_size
from jetcapture_py.jetstream.settings import normal
from jetcapture_py.manage.plan import Plan, SettingChange
from jetcapture_py.text import escaped

DURATIONS = frozenset(
    {
        "ack_wait",
        "duplicate_window",
        "inactive_threshold",
        "max_age",
        "max_expires",
        "subject_delete_marker_ttl",
    }
)
SIZES = frozenset({"max_bytes", "max_msg_size"})
LIMITS = frozenset({"max_ack_pending", "max_consumers", "max_deliver", "max_msgs", "max_msgs_per_subject"})
_WORDS = frozenset(
    {"ack_policy", "compression", "deliver_policy", "discard", "persist_mode", "replay_policy", "retention", "storage"}
)
_NOTHING: tuple[Any, ...] = (None, "", (), [], {}, False)
_NOUNS = {"create": "will be created", "update": "will be changed", "none": "is as configured"}
_DONE = {"create": "created", "update": "changed", "none": "is as configured"}


def human(name: str, value: Any) -> Any:
    """Convert a value of the API to one of a configuration file."""
    if isinstance(value, dict):
        found = {each: human(each, part) for each, part in value.items() if each == "name" or normal(each, part)}
        return value if name == "metadata" else found
    if name == "backoff":
        return [format_nanoseconds(each) for each in value]
    if isinstance(value, list | tuple):
        return [human("", each) for each in value]
    if name in DURATIONS and isinstance(value, int):
        return UNLIMITED if value <= 0 and name == "max_age" else format_nanoseconds(max(value, 0))
    if name in SIZES and isinstance(value, int):
        return format_size(value) if value > 0 else UNLIMITED
    return UNLIMITED if name in LIMITS and value in (-1, 0) else value


def lines(plan: Plan, *, done: bool) -> Iterator[Text]:
    """Describe a plan: one line for the stream or consumer, and one for each change."""
    words = (_DONE if done else _NOUNS)[plan.action] if plan.possible else "cannot be configured like this"
    head = Text(f"{plan.kind} {plan.name}: {words}")
    yield head
    if plan.refusal:
        yield Text(f"  {plan.refusal}", "yellow")
    width = max((len(change.name) for change in plan.changes), default=0)
    for change in plan.changes:
        yield _line(change, width, created=plan.action == "create")


def _line(change: SettingChange, width: int, *, created: bool) -> Text:
    line = Text(f"  {escaped(change.name).ljust(width)} ")
    before = () if created else (("-", change.old, "red"),)
    for sign, value, style in (*before, ("+", change.new, "green")):
        if value not in _NOTHING or change.name in LIMITS | SIZES | {"max_age"}:
            line.append(f" {sign}{shown(change.name, value)}", style)
    if change.refusal:
        line.append(f"  cannot be changed: {change.refusal}", "yellow")
    return line


def shown(name: str, value: Any) -> str:
    """Return a value of the API as text."""
    text = human(name, value or 0) if name in LIMITS | SIZES | DURATIONS else human(name, value)
    bare = isinstance(text, str) and name in LIMITS | SIZES | DURATIONS | _WORDS
    return str(text) if bare else json.dumps(text, ensure_ascii=False)
