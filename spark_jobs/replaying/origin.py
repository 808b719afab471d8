"""Find the stream incarnations and consumers behind an archive from a few objects' footers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow.parquet as pq

from jetcapture_py.archive import layout
from jetcapture_py.archive.footer import entries
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.errors import VanishedError
from spark_jobs.reading.place import Place
from spark_jobs.replaying.target import Origin

_THREADS = 32


def origin_of(url: str, stream: str, options: Mapping[str, Any], *, quarantine: bool = False) -> Origin:
    """Return the stream's creation times and the consumers that captured it. Raises JetcaptureError."""
    place = Place.open(url, options)
    directory = f"{layout.QUARANTINE}/{stream}" if quarantine else stream
    paths = map(layout.parse_path, place.files(directory))
    found = [name for name in paths if name is not None and name.parquet]
    # within a bucket, the later incarnation of a recreated stream has the lower sequences
    names = sorted((name for name in found if not name.event_time), key=lambda name: (name.bucket, -name.first_seq))
    others = [name for name in found if name.event_time]  # their buckets are in no order with incarnations
    created: dict[str, None] = {}
    consumers: dict[str, None] = {}
    with ThreadPoolExecutor(_THREADS) as threads:
        footers = [*_footers(place, names), *threads.map(lambda name: _footer(place, name), others)]
    for times, captured_by in footers:
        created |= dict.fromkeys(times)
        consumers |= dict.fromkeys(captured_by)
    return Origin(stream=stream, created=tuple(sorted(created)), consumers=tuple(consumers))


_Footer = tuple[tuple[str, ...], tuple[str, ...]]


def _footers(place: Place, names: Sequence[ObjectName]) -> Iterator[_Footer]:
    """Yield footers of the first and last object, and, by bisection, of objects around each change of incarnation.

    Incarnations do not overlap: objects between two of the same incarnation belong to it as well.
    """
    if not names:
        return
    ends = (0, _footer(place, names[0])), (len(names) - 1, _footer(place, names[-1]))
    yield from (footer for _, footer in ends)
    open_ = [ends]
    while open_:
        (first, before), (last, after) = open_.pop()
        if last - first < 2 or before[0] == after[0]:
            continue
        middle = (first + last) // 2, _footer(place, names[(first + last) // 2])
        yield middle[1]
        open_ += [((first, before), middle), (middle, (last, after))]


def _footer(place: Place, name: ObjectName) -> _Footer:
    """Return the stream's creation times and the consumers; a compacted object may have several of each."""
    try:
        with place.reading(name.path), place.fs.open(f"{place.root}/{name.path}", "rb") as file:
            own = entries(pq.read_metadata(file).metadata)
    except VanishedError:  # just compacted
        own = {}
    created, consumers = (tuple(filter(None, own.get(name, "").split(","))) for name in ("stream_created", "consumer"))
    return created, consumers
