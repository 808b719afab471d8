"""Paths, columns and metadata keys of archive format 1. No other module knows them.

    {stream}/key={key}/date=YYYY-MM-DD/hour=HH/{bucket}-{first_seq}-{last_seq}-{rows}-{digest}{suffix}
    {stream}/bundle=NN/date=YYYY-MM-DD/hour=HH/{bucket}-{first_seq}-{last_seq}-{rows}-{digest}{suffix}
    _quarantine/{stream}/date=YYYY-MM-DD/hour=HH/{bucket}-{first_seq}-{last_seq}-{rows}-{digest}.parquet

The bucket's suffix is Z for stream time and E for event time (`block.time`), which says nothing about the stream's
timestamps.

Key and bucket are functions of the message, so every copy of a message lies under one (key, bucket); objects of one
(key, bucket) whose sequence ranges are disjoint cannot share a message. That is what lets a reader dedupe from names
alone. With `block.bundles`, the same holds for (bundle, bucket), since the bundle is a function of the key. If a bucket
has objects under keys and in bundles, or in bundles of different numbers (`jetcapture.bundles` in the footer), all of
them may share messages. This module imports nothing but the standard library, so that Spark jobs can.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache

FORMAT = "1"
SUFFIX = ".parquet"
COMPRESSED = {"none": "", "gzip": ".gz", "zstd": ".zst"}
"""Suffixes of compressed text objects, after that of the format."""
TEXT_SUFFIXES = tuple(f".{kind}{end}" for kind in ("ndjson", "csv") for end in COMPRESSED.values())
DEFAULT_PARTITION = "__HIVE_DEFAULT_PARTITION__"
QUARANTINE = "_quarantine"
MARKER = ".jetcapture=archive"
"""Marker file in the root of a local archive. With `{key}` in the URL, the keys' roots lie beside it; none can have
this name, because "=" is escaped in keys."""
PROBE = "_probe"
"""Directory of the small objects that startup checks write and remove."""
MAX_INTERVAL = 86_400
"""Names give only the start of a bucket: an object's messages may be this many seconds later."""
MAX_KEY_BYTES = 240
"""Maximum length of an escaped key in bytes: `key=` and the key are one directory name, limited to 255 bytes."""

STREAM = "_nats_stream"
SUBJECT = "_nats_subject"
SEQ = "_nats_seq"
TIMESTAMP = "_nats_timestamp"
NANOS = "_nats_nanos"
DELIVERED = "_nats_delivered"
HEADERS = "_nats_headers"
PAYLOAD = "_nats_payload"
ROW = "_nats_row"
TIME = "_nats_time"
RESCUED = "_nats_rescued"
"""Column of values that did not fit their inferred columns: a JSON object by path."""
ENVELOPE = (STREAM, SUBJECT, SEQ, TIMESTAMP, NANOS, DELIVERED, HEADERS, PAYLOAD)
OPTIONAL = (ROW, TIME, RESCUED)
"""Envelope columns that only some objects have."""
IDENTITY = (STREAM, SEQ, TIMESTAMP)
"""The columns that identify a message. The timestamp is needed because a recreated stream reuses sequences."""
STAGE, ERROR, RAW_HEADERS = "stage", "error", "raw_headers"
NOT_UTF8 = "subject"
"""The stage of a message whose subject is not UTF-8 and is stored with escapes."""
KEY = "key"
"""Column of the message's key."""
BUNDLE = "bundle"
PARTITIONS = (KEY, "date", "hour")
_ICEBERG = ("_deleted", "_file", "_pos", "_partition", "_spec_id", "_row_id", "_last_updated_sequence_number")
RESERVED = (*PARTITIONS, BUNDLE, *_ICEBERG)
"""Names that decoded columns cannot have: those of partitions, and of columns that Iceberg adds."""
STREAM_TIME = "timestamp"
"""The `block.time` for buckets by the stream's timestamps."""

FIELD_IDS = {
    STREAM: 1,
    SUBJECT: 2,
    SEQ: 3,
    TIMESTAMP: 4,
    DELIVERED: 5,
    HEADERS: 6,
    PAYLOAD: 7,
    ROW: 8,
    KEY: 9,
    NANOS: 10,
    TIME: 11,
    f"{HEADERS}\0key": 12,
    f"{HEADERS}\0value": 13,
    f"{HEADERS}\0value\0element": 14,
    RESCUED: 18,
}
"""Parquet field ids of the archive's own columns. No number is ever given to another column."""
QUARANTINE_FIELD_IDS = {STAGE: 15, ERROR: 16, RAW_HEADERS: 17}
"""Field ids of the quarantine's own columns; in other objects, decoded fields may have these names."""
MIN_FIELD_ID, MAX_FIELD_ID = 1000, 2_147_483_447
"""Range of the field ids of decoded fields. Iceberg reserves the numbers above it."""

METADATA_PREFIX = "jetcapture."
BUNDLES = "bundles"
"""Entry of the footer with the number of bundles."""
INTERVAL = "interval"
"""Entry of the footer with the length of the bucket in seconds."""
REPLACES = "replaces"
"""Entry of the footer with the digests of objects that this one replaces although it has fewer rows."""
CHECKSUM, FOOTER_CHECKSUM = "checksum", "footer_checksum"
CHECKSUM_DIGITS = 16

_UNSAFE = re.compile(r"""[\x00-\x1f\x7f"#%'*/:=?\\{}\[\]^<>|]""")
_ESCAPED = re.compile(r"%([0-9A-Fa-f]{2})")
_ESCAPED_BYTE = re.compile(rb"\\x([0-9a-f]{2})")
_LITERAL_BYTE = re.compile(rb"\\(?=x[0-9a-f]{2})")
_BUNDLE = re.compile(r"bundle=(\d{1,9})")
_NAME = re.compile(r"(\d{8}T\d{6})([ZE])-(\d{20})-(\d{20})-(\d+)-([0-9a-f]{16})(\.[a-z0-9.]+)")
_OWN_SUFFIX = re.compile(r"\.(?!(?:parquet|ndjson|csv|tmp)\b)[a-z0-9]{1,16}(?:\.[a-z0-9]{1,16})?")


def is_own_suffix(suffix: str) -> bool:
    """Return True if names of objects in a custom format may have this suffix."""
    return _OWN_SUFFIX.fullmatch(suffix) is not None


def field_name(name: str) -> str:
    """Return the column name of a decoded field: `RESERVED` names and `_nats_…` get `_` appended, case-insensitive.

    Case does not count because Spark compares column names without it.
    """
    folded = name.lower()
    return f"{name}_" if folded in RESERVED or folded.startswith("_nats_") or not name else name


def escape_key(key: str | None) -> str:
    """Return the key as a Hive partition value: special ASCII characters as %XX, null and "" as the default partition.

    Non-ASCII characters stay as they are, because Spark unescapes one character, not one UTF-8 byte, per %XX.
    """
    if not key:
        return DEFAULT_PARTITION
    if key == DEFAULT_PARTITION:
        return "%5F" + key[1:]
    return _UNSAFE.sub(lambda match: f"%{ord(match.group()):02X}", key)


def unescape_key(value: str) -> str | None:
    """Reverse `escape_key`; return None for the default partition."""
    if value == DEFAULT_PARTITION:
        return None
    return _ESCAPED.sub(lambda match: chr(int(match.group(1), 16)), value)


def escape_subject(subject: bytes) -> str:
    """Return a subject that is not UTF-8 as text: invalid bytes become `\\xNN`. The backslash of text that looks like
    that becomes `\\x5c`."""
    return _LITERAL_BYTE.sub(rb"\\x5c", subject).decode("utf-8", "backslashreplace")


def unescape_subject(text: bytes) -> bytes:
    """Reverse `escape_subject`, for its text in UTF-8."""
    return _ESCAPED_BYTE.sub(lambda match: bytes.fromhex(match[1].decode()), text)


def digest(seqs: bytes, timestamps: bytes) -> str:
    """Return 16 hex digits that identify the exact set of messages in a block.

    `seqs` and `timestamps` are the little-endian int64 bytes of the sequences and of the timestamps in microseconds,
    sorted by (sequence, timestamp), each message once.
    """
    state = hashlib.blake2b(seqs, digest_size=8)
    state.update(timestamps)
    return state.hexdigest()


def checksum(pieces: Iterable[bytes | memoryview], offsets: Iterable[int]) -> str:
    """Return a checksum of 16 hex digits over bytes in pieces; the 16 characters at each of `offsets` count as "0".

    The digits are written there later.
    """
    state = hashlib.blake2b(digest_size=CHECKSUM_DIGITS // 2)
    ordered, position = sorted(offsets), 0
    for piece in pieces:
        done = 0
        for offset in ordered:
            start, end = max(offset - position, done), min(offset + CHECKSUM_DIGITS - position, len(piece))
            if start < end:
                state.update(piece[done:start])
                state.update(b"0" * (end - start))
                done = end
        state.update(piece[done:])
        position += len(piece)
    return state.hexdigest()


def checksum_offsets(footer: bytes, entry: str, digits: str = "") -> list[int]:
    """Return the possible offsets of an entry's digits in a Parquet footer; a key may contain the same bytes.

    With `digits`, return only the offsets of these digits. User data cannot contain them by chance.
    """
    before = f"{METADATA_PREFIX}{entry}".encode() + bytes((0x18, CHECKSUM_DIGITS))  # Thrift: text of that length
    offsets, at = [], footer.find(before + digits.encode())
    while at >= 0:
        offsets.append(at + len(before))
        at = footer.find(before + digits.encode(), at + 1)
    return offsets


def field_ids(families: Mapping[str, str], *, quarantine: bool = False) -> dict[str, int]:
    """Return the Parquet field id of each column and nested field of an object, whatever their order.

    `families` has the family of each field's type (`schema.family`) by path. A path is the names from the column
    inward, joined by NUL; those inside lists and maps are `element`, `key` and `value`. The id of a decoded field is a
    hash of its path and the families along it, so that all values with one id fit one column of a table. Paths are in
    lower case, because names that differ in case only are one column. If two paths have the same hash, the later one
    gets the next free number.
    """
    field_ids = FIELD_IDS | (QUARANTINE_FIELD_IDS if quarantine else {})
    ids = {path: field_ids[path] for path in families if path in field_ids}
    taken = set(ids.values())
    for path in sorted(families, key=lambda path: (path.lower(), path)):
        if path not in ids:
            number = _hashed_id(_with_families(path, families))
            while number in taken:
                number = MIN_FIELD_ID if number == MAX_FIELD_ID else number + 1
            ids[path] = number
            taken.add(number)
    return ids


def _with_families(path: str, families: Mapping[str, str]) -> str:
    """Return the path in lower case, each name followed by a colon and the family of its type."""
    names = path.split("\0")
    paths = ("\0".join(names[: depth + 1]) for depth in range(len(names)))
    return "\0".join(f"{name.lower()}:{families[path]}" for name, path in zip(names, paths, strict=True))


@lru_cache(maxsize=4096)
def _hashed_id(text: str) -> int:
    digest_ = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return MIN_FIELD_ID + int.from_bytes(digest_, "big") % (MAX_FIELD_ID - MIN_FIELD_ID + 1)


def schema_id(columns: Iterable[str]) -> str:
    """Return 16 hex digits that identify a schema; `columns` are its `name:type` texts in order."""
    return hashlib.blake2b("\n".join(columns).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockId:
    """The key, or the bundle, and the bucket that all messages of a block share.

    `bundle` is as in the directory's name, "" without bundles; `bucket` is the interval's start in Unix seconds.
    """

    key: str | None
    bucket: int
    quarantine: bool = False
    bundle: str = ""


Group = tuple[str, bool, int, str, str | None]
"""Stream, whether it is the quarantine, bucket, bundle and key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectName:
    """An object's path, parsed.

    `key` is None for messages without a key, in the quarantine and in bundles; `bundle` is the bundle's number as in
    the directory's name, "" for objects that are not in bundles. `bucket` is the start of the interval in seconds since
    the epoch, UTC; with `event_time`, of an interval of event time. `first_seq` and `last_seq` are inclusive stream
    sequences. `suffix` identifies the format.
    """

    stream: str
    key: str | None
    bucket: int
    first_seq: int
    last_seq: int
    rows: int
    digest: str
    quarantine: bool = False
    event_time: bool = False
    suffix: str = SUFFIX
    bundle: str = ""
    _parsed: str = field(init=False, repr=False, compare=False, default="")
    """The parsed path, cached because large plans ask for it repeatedly."""

    @property
    def directory(self) -> str:
        """Path of the object's directory, relative to the archive's root."""
        if self.quarantine:
            head = f"{QUARANTINE}/{self.stream}"
        elif self.bundle:
            head = f"{self.stream}/{BUNDLE}={self.bundle}"
        else:
            head = f"{self.stream}/{KEY}={escape_key(self.key)}"
        return f"{head}/{_bucket_names(self.bucket)[0]}"

    @property
    def path(self) -> str:
        """Path of the object, relative to the archive's root."""
        if self._parsed:
            return self._parsed
        start = _bucket_names(self.bucket)[1]
        start = f"{start[:-1]}E" if self.event_time else start
        name = f"{start}-{self.first_seq:020}-{self.last_seq:020}-{self.rows}-{self.digest}{self.suffix}"
        return f"{self.directory}/{name}"

    @property
    def parquet(self) -> bool:
        """Whether it is a Parquet file."""
        return self.suffix == SUFFIX

    @property
    def text(self) -> bool:
        """Whether it is an NDJSON or CSV file."""
        return self.suffix in TEXT_SUFFIXES

    @property
    def group(self) -> Group:
        """Deduplication group: all copies of a message are in one group, unless its bucket has several layouts
        (`groups`)."""
        return self.stream, self.quarantine, self.bucket, self.bundle, self.key


@lru_cache(maxsize=4096)  # there are few buckets, and formatting a time takes longer than everything else
def _bucket_names(bucket: int) -> tuple[str, str]:
    """Return a bucket's directories, and the start of its objects' names."""
    at = datetime.fromtimestamp(bucket, UTC)
    return f"date={at:%Y-%m-%d}/hour={at:%H}", f"{at:%Y%m%dT%H%M%SZ}"


def bucket_text(bucket: int) -> str:
    """Return a bucket as in objects' names: `YYYYMMDDTHHMMSSZ`."""
    return _bucket_names(bucket)[1]


@lru_cache(maxsize=4096)
def parse_bucket(text: str) -> int | None:
    """Parse the bucket at the start of an object's name, without the suffix; None if invalid."""
    try:
        return int(datetime.strptime(text, "%Y%m%dT%H%M%S").replace(tzinfo=UTC).timestamp())
    except ValueError:
        return None


def parse_path(path: str) -> ObjectName | None:
    """Parse a path relative to the archive's root; None if it is not an object's."""
    parts = path.split("/")
    quarantine = parts[0] == QUARANTINE
    parts = parts[1:] if quarantine else parts
    if len(parts) != (4 if quarantine else 5):
        return None
    match = _NAME.fullmatch(parts[-1])
    bundle = None if quarantine else _BUNDLE.fullmatch(parts[1])
    if match is None or not (quarantine or bundle or parts[1].startswith("key=")):
        return None
    bucket, suffix = parse_bucket(match.group(1)), match.group(7)
    if bucket is None or not (suffix == SUFFIX or (not quarantine and _is_other(suffix))):
        return None
    name = ObjectName(
        stream=parts[0],
        key=None if quarantine or bundle else unescape_key(parts[1].removeprefix("key=")),
        bundle=bundle[1] if bundle else "",
        bucket=bucket,
        first_seq=int(match.group(3)),
        last_seq=int(match.group(4)),
        rows=int(match.group(5)),
        digest=match.group(6),
        quarantine=quarantine,
        event_time=match.group(2) == "E",
        suffix=suffix,
    )
    if name.path != path:
        return None
    object.__setattr__(name, "_parsed", path)
    return name


def _is_other(suffix: str) -> bool:
    return suffix in TEXT_SUFFIXES or is_own_suffix(suffix)


Bundles = Mapping[ObjectName, int]
"""The number of bundles of objects in bundles, from their footers."""


def groups(names: Iterable[ObjectName], bundles: Bundles | None = None) -> Callable[[ObjectName], Group]:
    """Return a function from an object to its deduplication group. A bucket with several layouts is one group."""
    layouts: dict[tuple[str, int], int] = {}
    mixed: set[tuple[str, int]] = set()
    for name in names:
        if not name.quarantine:
            bucket = name.stream, name.bucket
            layout = layout_of(name, bundles)
            if layouts.setdefault(bucket, layout) != layout:
                mixed.add(bucket)

    def group(name: ObjectName) -> Group:
        if name.quarantine or (name.stream, name.bucket) not in mixed:
            return name.group
        return name.stream, False, name.bucket, "", None

    return group


def overlap(one: ObjectName, other: ObjectName) -> bool:
    """Whether the ranges of two objects' sequences overlap."""
    return one.first_seq <= other.last_seq and other.first_seq <= one.last_seq


def is_one_of(bundle: str, bundles: str) -> bool:
    """Whether the bundle in a directory's name is one of the footer's `bundles`; both are "" without bundles."""
    if not (bundle and bundles):
        return bundle == bundles
    return bundles.isdecimal() and int(bundle) < int(bundles) and len(bundle) == len(str(int(bundles) - 1))


def layout_of(name: ObjectName, bundles: Bundles | None = None) -> int:
    """Return the number of bundles of an object's layout; 0 for an object under its key.

    If it is not in `bundles`, return minus the number of digits, which only layouts of as many digits share.
    """
    return bundles.get(name, -len(name.bundle)) if bundles else -len(name.bundle)


def split_overlapping(
    names: Iterable[ObjectName], bundles: Bundles | None = None
) -> tuple[list[ObjectName], list[ObjectName]]:
    """Split objects into those without copies elsewhere and those that may share messages.

    Objects may share a message only when they are of one group and their sequence ranges overlap.
    """
    alone: list[ObjectName] = []
    shared: list[ObjectName] = []
    for cluster in clusters(names, bundles):
        (alone if len(cluster) == 1 else shared).extend(cluster)
    return alone, shared


def clusters(names: Iterable[ObjectName], bundles: Bundles | None = None) -> Iterator[list[ObjectName]]:
    """Yield clusters of objects of one group whose sequence ranges overlap; a single object is a cluster."""
    every = list(names)
    group_of = groups(every, bundles)
    cluster: list[ObjectName] = []
    end, last = -1, None
    for name in sorted(every, key=lambda n: (repr(group_of(n)), n.first_seq, n.last_seq)):
        group = group_of(name)
        if cluster and (group != last or name.first_seq > end):
            yield cluster
            cluster, end = [], -1
        cluster.append(name)
        end, last = max(end, name.last_seq), group
    if cluster:
        yield cluster
