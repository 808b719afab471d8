"""Find the stream incarnations and consumers behind an archive: from its watermark, and a few objects' footers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jetcapture_py.archive import layout
from jetcapture_py.archive.info import BadObject
from jetcapture_py.errors import VanishedError
from jetcapture_py.store.archive import ArchiveFiles, File
from spark_jobs.reading.location import ArchiveLocation
from spark_jobs.replaying.target import Origin


def origin_of(url: str, stream: str, options: Mapping[str, Any], *, quarantine: bool = False) -> Origin:
    """Return the stream's creation times and the consumers that captured it. Raises JetcaptureError."""
    files = ArchiveLocation.open(url, options).files
    directory = f"{layout.QUARANTINE}/{stream}" if quarantine else stream
    objects = [(file.name, file) for file in files.below(directory) if file.name is not None and file.name.parquet]
    # within a bucket, the later incarnation of a recreated stream has the lower sequences
    ordered = [pair for pair in objects if not pair[0].event_time]
    ordered.sort(key=lambda pair: (pair[0].bucket, -pair[0].first_seq))
    others = [file for name, file in objects if name.event_time]  # not in the order of incarnations
    created: dict[str, None] = {}
    mark = files.watermark(stream)  # an archive shared by several captures has their objects in any order
    consumers = dict.fromkeys(file.consumer for file in mark.files) if mark is not None else {}
    footers = [
        *_footers(files, [file for _, file in ordered]),
        *files.map(lambda file: _footer(files, file), others),
    ]
    for times, captured_by in footers:
        created |= dict.fromkeys(times)
        consumers |= dict.fromkeys(captured_by)
    return Origin(stream=stream, created=tuple(sorted(created)), consumers=tuple(consumers))


_Footer = tuple[tuple[str, ...], tuple[str, ...]]


def _footers(files: ArchiveFiles, objects: Sequence[File]) -> Iterator[_Footer]:
    """Yield footers of the first and last object, and, by bisection, of objects around each change of incarnation.

    Incarnations do not overlap: objects between two of the same incarnation belong to it as well.
    """
    if not objects:
        return
    ends = (0, _footer(files, objects[0])), (len(objects) - 1, _footer(files, objects[-1]))
    yield from (footer for _, footer in ends)
    open_ = [ends]
    while open_:
        (first, before), (last, after) = open_.pop()
        if last - first < 2 or before[0] == after[0]:
            continue
        middle = (first + last) // 2, _footer(files, objects[(first + last) // 2])
        yield middle[1]
        open_ += [((first, before), middle), (middle, (last, after))]


def _footer(files: ArchiveFiles, file: File) -> _Footer:
    """Return the stream's creation times and the consumers; a compacted object may have several of each."""
    try:
        (info,) = files.infos([file], detailed=lambda _: True)
    except VanishedError:  # just compacted
        return (), ()
    if isinstance(info, BadObject):
        raise files.refusal(info)
    return info.details.created, info.details.consumers
