"""Headers that are instructions to a server, and are not published again with an archived message.

A server obeys them, or relies on them later, from any publisher: a rollup purges messages of the target stream, a fired
schedule purges its schedule, a TTL removes the message. The list covers nats-server 2.10 to 2.15.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import reduce

import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.jetstream.publish.frames import MESSAGE_ID, distinct_names, without

MARKER = "Nats-Marker-Reason"
"""Header of a server's marker: the last message of a subject was removed; in a bucket, a key has no entry."""
OBEYED = ("Nats-Rollup", "Nats-TTL", MARKER, "Nats-Incr", "Nats-Counter-Sources", "Nats-Schedule", "Nats-Scheduler")
"""Instructions about the message, which a user may want to repeat, besides `Nats-Schedule-*`."""
NEVER = (MESSAGE_ID, "Nats-Pin-Id", "Nats-Stream-Source", "Nats-Request-Info", "Nats-Required-Api-Level")
"""Instructions about one publish, or a server's statements about another publish or a delivery."""
NEVER_PREFIXES = ("Nats-Expected-", "Nats-Batch-", "Nats-Trace-")

_KEEPABLE = rf"{'|'.join(OBEYED)}|Nats-Schedule-[^:]*"
_PATTERN = rf"{_KEEPABLE}|{'|'.join(NEVER)}|({'|'.join(NEVER_PREFIXES)})[^:]*"
_INSTRUCTION = re.compile(_PATTERN, re.IGNORECASE)
_OPERATION = "KV-Operation"
_BUCKET = "$KV."


def keepable(name: str) -> str:
    """Return the name of an instruction that may be published again. Raises ValueError for another header."""
    if re.fullmatch(_KEEPABLE, name, re.IGNORECASE):
        return name
    reason = "it cannot be repeated" if _INSTRUCTION.fullmatch(name) else "it is kept in any case"
    raise ValueError(f"{name}: {reason}; expected one of {', '.join(OBEYED)} or Nats-Schedule-*")


def instructs(header: str, kept: Collection[str] = ()) -> bool:
    """Whether a header is an instruction to the server, other than those to keep."""
    return _INSTRUCTION.fullmatch(header) is not None and header.lower() not in map(str.lower, kept)


def without_instructions(
    subjects: pa.Array, headers: pa.MapArray, kept: Collection[str] = ()
) -> tuple[pa.MapArray, pa.BooleanArray]:
    """Remove instructions from the headers of messages to `subjects`; also return a mask of the messages with any.

    A server's marker in a KV bucket becomes a client's deletion, because the key would otherwise get an empty value.
    """
    removed = {name for name in distinct_names(headers) if instructs(name, kept)}
    masks = [pc.map_lookup(headers, name, "first").is_valid() for name in removed]
    instructed = reduce(pc.or_, masks, pa.repeat(pa.scalar(False), len(headers)))  # noqa: FBT003
    if MARKER in removed:
        rows = zip(subjects.to_pylist(), headers.to_pylist(), strict=True)
        headers = pa.array([_as_operation(subject, row) for subject, row in rows], headers.type)
    return (without(headers, removed.__contains__) if removed else headers), instructed


def _as_operation(subject: str | None, headers: list[tuple[str, list[str]]] | None) -> object:
    reasons = dict(headers or ()).get(MARKER)
    if headers is None or reasons is None or not (subject or "").startswith(_BUCKET):
        return headers
    others = [header for header in headers if header[0] != _OPERATION]
    return [*others, (_OPERATION, ["DEL" if reasons == ["Remove"] else "PURGE"])]
