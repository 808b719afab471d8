"""Types of settings for the configuration's models, with validation.

A type turns a YAML value into a setting, or raises ValueError with the expected form in one line; `section` adds the
file's value. Types that may hold a secret raise `hidden`, to which nothing is added.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationInfo,
    WithJsonSchema,
)

from jetcapture_py import plugins
from jetcapture_py.config import buckets, yaml_text
from jetcapture_py.config.section import did_you_mean, hidden
from jetcapture_py.config.template import parse_template
from jetcapture_py.config.units import (
    DURATION_PATTERN,
    RFC3339,
    SIZE_PATTERN,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)
from jetcapture_py.errors import ConfigError

DAY = 86_400
_WORD = r"[^\s.*>]+"
_SUBJECT = rf"{_WORD}(?:\.{_WORD})*"
_SCHEMES = ("nats", "tls", "ws", "wss")
TEXT_FORMATS, TEXT_COMPRESSIONS = ("ndjson", "csv"), ("none", "gzip", "zstd")
"""Text formats of objects, and their compressions."""
_STORES = ("file", "s3", "abfs", "az", "gs", "memory")


def _at_least(minimum: float, parse: Callable[[object], float], show: Callable[[Any], str]) -> BeforeValidator:
    def check(value: object) -> float:
        if (number := parse(value)) < minimum:
            raise ValueError(f"expected at least {show(minimum)}")
        return number

    return BeforeValidator(check)


def _that(matches: Callable[[Any], object], expected: str) -> AfterValidator:
    """Accept values for which a function returns true."""

    def check(value: Any) -> Any:
        if not matches(value):
            raise ValueError(f"expected {expected}")
        return value

    return AfterValidator(check)


def _printable(pattern: str) -> Callable[[str], bool]:
    return lambda value: re.fullmatch(pattern, value) is not None and value.isprintable()


def one_of(*choices: str) -> AfterValidator:
    """Accept one of the `choices`, or a user's object."""

    def check(value: str) -> str:
        if value not in choices and not plugins.is_reference(value):
            raise ValueError(f"expected {', '.join(choices)} or package.module:object{did_you_mean(value, choices)}")
        return value

    return AfterValidator(check)


def _retry_for(value: object) -> float:
    return math.inf if value in ("forever", math.inf) else parse_duration(value)


def _number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("expected a whole number")
    return value


def _secret(value: object) -> SecretStr:
    if isinstance(value, SecretStr):
        return value
    if not isinstance(value, str):
        raise hidden("expected text; put it in quotes")
    if not value:
        raise hidden("expected non-empty text")
    return SecretStr(value)


def _path(value: object) -> Path:
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value or not value.isprintable():
        raise hidden("expected the path of a file")
    return Path(value)


_METADATA_TABLES = frozenset(
    (
        *("entries", "files", "data_files", "delete_files", "history", "metadata_log_entries", "snapshots", "refs"),
        *("manifests", "partitions", "position_deletes", "all_data_files", "all_delete_files", "all_files"),
        *("all_manifests", "all_entries"),
    )
)


_DIRECTORIES = frozenset(
    ("_quarantine", "_watermark", "_streams", "_columns", "_erased", "_expired", "_table", "_probe")
)
"""Directories of an archive that do not belong to a stream."""
_is_name = _printable(r"[^\s.*>/\\]{1,255}")


def is_stream_name(value: str) -> bool:
    """Whether a directory of an archive may belong to a stream."""
    return _is_name(value) and value not in _DIRECTORIES


def _is_delimiter(value: str) -> bool:
    return len(value) == 1 and value.isascii() and not value.isalnum() and value not in '"\r\n\0'


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _server(value: str) -> str:
    if "@" in value:
        raise hidden("credentials are not part of an address; use nats.user and nats.password, or nats.token")
    try:
        parts = urlsplit(value)
        usable = parts.hostname and (parts.port is None or parts.port > 0) and value.isprintable() and " " not in value
    except ValueError:
        usable = False
    else:
        if parts.scheme not in _SCHEMES or "://" not in value:
            raise ValueError("expected an address that starts with nats://, tls://, ws:// or wss://")
    if not usable:
        raise ValueError("expected an address such as nats://127.0.0.1:4222")
    return value


def _servers(value: tuple[str, ...]) -> tuple[str, ...]:
    if not value:
        raise hidden("expected at least one address")
    if len({address.startswith("ws") for address in value}) > 1:
        raise hidden("expected only ws:// and wss://, or only nats:// and tls://")
    return value


def _start_time(value: object) -> datetime:
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.astimezone(UTC)
    try:
        if isinstance(value, str) and RFC3339.fullmatch(value):
            return datetime.fromisoformat(value.upper()).astimezone(UTC)
    except (ValueError, OverflowError):
        pass  # such as 30 February
    raise ValueError("expected a time with its zone such as 2026-01-31T00:00:00Z")


def _exact_time(value: object) -> str:
    _start_time(value)  # raises ValueError
    return str(value).upper()


def _type(value: str) -> str:
    from jetcapture_py.config.column_types import parse_type

    parse_type(value)
    return value


def _given(value: object) -> object:
    if value is None:
        raise ValueError('expected a template such as "{subject}"; write "" for one key')
    return value


def _template(value: str) -> str:
    if not plugins.is_reference(value):
        parse_template(value)
    return value


def _registry(value: str) -> str:
    """Check an address. Errors show only its scheme, because it may contain credentials."""
    scheme, separator, rest = value.partition("://")
    if not value.isprintable() or not (rest if separator else value):
        raise hidden("expected a directory, or an address such as http://registry:8081")
    if separator and scheme not in ("http", "https"):
        raise hidden("expected a directory, or an address that starts with http:// or https://")
    if separator and "@" in rest.split("/")[0]:
        raise hidden("credentials are not part of an address")
    return value


def _is_block_time(value: str) -> bool:
    try:
        return [part.kind for part in parse_template(f"{{{value}}}")] in (["field"], ["header"])
    except ValueError:
        return False


def _is_listen(value: str) -> bool:
    try:
        parts = urlsplit(f"//{value}")
        others = (parts.path, parts.query, parts.fragment, parts.username is not None)
        return parts.port is not None and not any(others) and value.isprintable() and " " not in value
    except ValueError:
        return False


def _store_url(value: str, info: ValidationInfo) -> str:
    """Check an address. Errors show only its scheme, because it may contain credentials."""
    if not value.isprintable() or re.search(r"[{}]", value.replace("{key}", "")):
        raise hidden("expected an address without control characters and with no placeholder but {key}")
    scheme, separator, rest = value.partition("://")
    if not separator:
        if not value.startswith("/"):
            raise hidden("expected an absolute path, or an address such as s3://bucket/path")
        return value
    if info.data.get("type"):
        return value
    if scheme not in _STORES:
        schemes = ", ".join(f"{name}://" for name in _STORES)
        raise hidden(f"expected an absolute path or one of {schemes}{did_you_mean(scheme, _STORES)}")
    if scheme == "file" and not rest.startswith("/"):
        raise hidden("expected three slashes and an absolute path, as in file:///var/lib/jetcapture")
    if scheme != "memory" and not rest.split("/")[0] and scheme != "file":
        raise hidden(f"expected a bucket or container, as in {scheme}://bucket/path")
    if scheme not in ("file", "memory") and (":" in rest.rpartition("@")[0] or "?" in rest):
        raise hidden("credentials are not part of an address; use store.options")
    return value


def _schema(pattern: str, number: str) -> WithJsonSchema:
    return WithJsonSchema({"type": ["string", number], "pattern": pattern, "minimum": 0})


_DURATION = _schema(DURATION_PATTERN, "number")
_SIZE = _schema(SIZE_PATTERN, "integer")
_SECOND = _at_least(1, parse_duration, format_duration)
_WITHOUT_WILDCARDS = _that(_printable(_SUBJECT), "a subject without wildcards and spaces")

Duration = Annotated[float, _at_least(0.001, parse_duration, format_duration), _DURATION]
"""Seconds; at least a millisecond."""
DurationOfSeconds = Annotated[float, _SECOND, _DURATION]
"""Seconds; at least one."""
Interval = Annotated[
    float,
    _SECOND,
    _that(
        lambda seconds: seconds.is_integer() and not DAY % seconds,
        "whole seconds that divide a day evenly, such as 15m or 1h",
    ),
    _DURATION,
]
"""Whole seconds that divide a day evenly, so that a bucket never crosses midnight."""
RetryFor = Annotated[float, BeforeValidator(_retry_for), _schema(f"^forever$|{DURATION_PATTERN}", "number")]
"""Seconds; infinity for `forever`."""
DurationFromZero = Annotated[float, _at_least(0, parse_duration, format_duration), _DURATION]
"""Seconds; 0 is allowed."""
Size = Annotated[int, _at_least(1, parse_size, format_size), _SIZE]
"""Bytes, at least one."""
Memory = Annotated[int, _at_least(32 << 20, parse_size, format_size), _SIZE]
"""Bytes, at least 32 MiB."""
Count = Annotated[int, Field(ge=1), BeforeValidator(_number)]
"""A whole number from 1."""
Secret = Annotated[SecretStr, BeforeValidator(_secret)]
"""Text that is never shown."""
FilePath = Annotated[Path, BeforeValidator(_path)]
"""Never shown in errors, because the file's contents may have been pasted."""
Context = Annotated[str, _that(str.isprintable, "the name of a NATS CLI context, or the path of its file")]
"""The name of a NATS CLI context, the path of its file, or "" for the selected one."""
Name = Annotated[str, _that(_is_name, "a name without spaces, '.', '*', '>', '/' and '\\'")]
"""A name that NATS accepts for a consumer."""
StreamName = Annotated[Name, _that(is_stream_name, "another name; the archive has a directory that is called so")]
"""A name that NATS accepts for a stream, and the archive for its directory."""
StreamPattern = Annotated[
    str,
    _that(
        _printable(r"!?[^\s.>/\\!][^\s.>/\\]{0,254}"), "a stream's name, or a pattern such as orders-* or !orders-test"
    ),
]
"""The name of a stream or a bucket, in which `*` is any text; `!` before it excludes."""
TableName = Annotated[
    str,
    _that(_printable(r"[^\s./\\]+(?:\.[^\s./\\]+)+"), "a namespace and a name, such as nats.orders"),
    _that(
        lambda name: name.rpartition(".")[2].lower() not in _METADATA_TABLES,
        "another name than that of a metadata table of Iceberg",
    ),
]
"""The name of a table in a catalog."""
TableLocation = Annotated[str, _that(_printable(r"[a-z][a-z0-9]*://\S+"), "a URL such as s3://bucket/tables")]
BucketName = Annotated[str, _that(buckets.is_name, "ASCII letters, digits, '-' and '_'")]
"""A name that NATS accepts for a KV bucket or an object store."""
Subject = Annotated[str, _WITHOUT_WILDCARDS]
FilterSubject = Annotated[
    str, _that(_printable(rf"(?:(?:\*|{_WORD})\.)*(?:[*>]|{_WORD})"), "a subject such as orders.*.new or orders.>")
]
"""A subject, with wildcards or without."""
Servers = Annotated[
    tuple[Annotated[str, AfterValidator(_server)], ...],
    BeforeValidator(_one_or_many, json_schema_input_type=str | list[str]),
    AfterValidator(_servers),
]
"""Addresses of one cluster; a single one needs no list."""
StartTime = Annotated[datetime, BeforeValidator(_start_time), WithJsonSchema({"type": "string", "format": "date-time"})]
"""A time, in UTC; digits beyond microseconds are cut off."""
ExactTime = Annotated[str, BeforeValidator(_exact_time), WithJsonSchema({"type": "string", "format": "date-time"})]
"""A time with its zone as written, with all digits."""
TypeText = Annotated[str, AfterValidator(_type)]
"""An Arrow type as `column_types.parse_type` reads it."""
Template = Annotated[str, BeforeValidator(_given), AfterValidator(_template)]
"""A key template as in `template`, or a user's function."""
Registry = Annotated[str, AfterValidator(_registry)]
Delimiter = Annotated[str, _that(_is_delimiter, "a character such as | or ;")]
BlockFormat = Annotated[str, one_of("parquet", *TEXT_FORMATS)]
BlockTime = Annotated[str, _that(_is_block_time, "timestamp, a decoded field such as created_at, or header.NAME")]
Reference = Annotated[str, _that(plugins.is_reference, "package.module:object")]
SubjectTemplate = Annotated[
    str,
    _that(lambda text: not {*"{}"} & {*text.replace("{stream}", "")}, "a subject with no placeholder but {stream}"),
    _WITHOUT_WILDCARDS,
]
"""A subject without wildcards that may contain `{stream}`."""
Listen = Annotated[str, _that(_is_listen, "an address and a port such as 127.0.0.1:8080 or :8080")]
"""Address and port to listen on; without an address, all of this host; port 0 is any free one."""
StoreUrl = Annotated[str, AfterValidator(_store_url)]
"""Location of the archive: an absolute path or a URL."""
Options = dict[str, Any]


def parse_option(text: str) -> tuple[str, object]:
    """Parse `NAME=VALUE` as one of `store.options`, with environment variables in place. Raises ValueError."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError("NAME=VALUE is expected")
    try:
        return name, yaml_text.read(value, os.environ)
    except ConfigError as error:
        problem = error.problems[0].removeprefix(": ")
    raise ValueError(f"{name}: {problem}")
