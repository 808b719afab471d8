"""KV buckets (ADR-8) and object stores (ADR-20) as streams: names, subjects and defaults."""

from __future__ import annotations

import re
from datetime import date, datetime
from typing import Any

from jetcapture_py.config.units import got, parse_time
from jetcapture_py.errors import JetcaptureError

AsOf = datetime | date | str | int
"""A time (inclusive), or a revision: a sequence of the stream."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,200}")
PREFIXES = {"bucket": "KV_", "object_store": "OBJ_"}
"""Prefixes of stream names, by the setting that names the bucket or the object store."""
DEFAULT_KEYS = {"bucket": "", "object_store": "{subject[2]}"}
"""One destination for a bucket; for an object store one for metadata (M) and one for contents (C)."""
COLUMNS = ("key_name", "operation", "revision")
"""Columns of a bucket's entries besides the decoded values."""
PUT = "put"
"""The operation of an entry without a header for another one."""
SUBJECTS = r"^\$KV\.[^.]+\."
"""Prefix of entries' subjects, before the key."""
OPERATION = "KV-Operation"
"""Header of entries that delete others."""
OPERATIONS = {"DEL": "delete", "PURGE": "purge"}
"""Operations by `OPERATION`."""
MARKER = "Nats-Marker-Reason"
"""Header of the server's marker messages for removed ones, which have no payload."""
REASONS = {"MaxAge": "expire", "Purge": "purge", "Remove": "delete"}
"""Operations by `MARKER` (ADR-43, ADR-48)."""


def bucket_of(stream: str) -> tuple[str, str] | None:
    """Return the setting and the name of the bucket or the object store behind a stream; None for other streams."""
    for setting, prefix in PREFIXES.items():
        if stream.startswith(prefix) and is_name(stream.removeprefix(prefix)):
            return setting, stream.removeprefix(prefix)
    return None


def is_name(text: str) -> bool:
    """Whether NATS accepts a KV bucket or an object store of this name."""
    return _NAME.fullmatch(text) is not None


def new_stream(setting: str, name: str) -> dict[str, Any]:
    """Return the configuration of a new bucket or object store, as clients create it."""
    common = {"discard": "new", "allow_rollup_hdrs": True, "allow_direct": True}
    if setting == "bucket":
        return {"subjects": [f"$KV.{name}.>"], "max_msgs_per_subject": 1, "deny_delete": True, **common}
    return {"subjects": [f"$O.{name}.C.>", f"$O.{name}.M.>"], **common}


def moment(as_of: AsOf | None) -> int | datetime | None:
    """Return a revision, a time with a time zone, or None. Raises JetcaptureError."""
    if as_of is None or (isinstance(as_of, int) and not isinstance(as_of, bool)):
        return as_of
    try:
        return parse_time(as_of)
    except ValueError as error:
        raise JetcaptureError(f"as_of: {got(f'{error}; or a revision, as a number', as_of)}") from None
