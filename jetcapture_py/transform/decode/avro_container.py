"""Parse Avro object container files: a header with the writer's schema, then blocks of datums, compressed or not.

The library is not used for this, because it decompresses blocks of any size.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping

from jetcapture_py.archive.varint import varint
from jetcapture_py.transform.decode.common import show
from jetcapture_py.transform.decode.compression import inflate_raw, inflate_zstd, snappy_block

_MAGIC = b"Obj\x01"
_SYNC = 16


class Header:
    """The header of the file `payload`. Raises ValueError without one."""

    def __init__(self, payload: bytes) -> None:
        self._payload, self._at = payload, len(_MAGIC)
        if not payload.startswith(_MAGIC):
            raise ValueError("not an object container file")
        meta: dict[bytes, bytes] = {}
        while count := self._long():
            if count < 0:
                count, _ = -count, self._long()
            if count > len(payload):
                raise ValueError("the header is truncated")
            for _ in range(count):
                name = self._bytes(self._long())
                meta[name] = self._bytes(self._long())
        self._sync = self._bytes(_SYNC)
        self.schema = meta.get(b"avro.schema", b"")
        """The writer's schema, as JSON."""
        codec = meta.get(b"avro.codec", b"null")
        if codec not in _CODECS:
            raise ValueError(f"the codec {show(codec)[1:]} is not supported: null, deflate, snappy or zstandard")
        self._inflate = _CODECS[codec]

    def blocks(self, most: int) -> Iterator[tuple[int, bytes]]:
        """Yield the row count and the data of each block, at most `most` bytes in total. Raises ValueError."""
        while self._at < len(self._payload):
            count, size = self._long(), self._long()
            data = self._inflate(self._bytes(size), most)
            if self._bytes(_SYNC) != self._sync:
                raise ValueError("a block does not end with the file's marker")
            if count < 0:
                raise ValueError(f"a block announces {count} rows")
            most -= len(data)
            yield count, data

    def _bytes(self, size: int) -> bytes:
        found = self._payload[self._at : self._at + size] if size >= 0 else b""
        if len(found) != size:
            raise ValueError("the file is truncated")
        self._at += size
        return found

    def _long(self) -> int:
        """Read a zig-zag varint of up to 64 bits."""
        value, self._at = varint(self._payload, self._at)
        return value >> 1 ^ -(value & 1)


def _plain(data: bytes, most: int) -> bytes:
    if len(data) > most:
        raise ValueError("the blocks are larger than decode.max_inflated")
    return data


def _snappy(data: bytes, most: int) -> bytes:
    found = snappy_block(data[:-4], most)
    if zlib.crc32(found) != int.from_bytes(data[-4:], "big"):
        raise ValueError("the snappy data is damaged: its checksum differs")
    return found


_CODECS: Mapping[bytes, Callable[[bytes, int], bytes]] = {
    b"null": _plain,
    b"deflate": inflate_raw,
    b"snappy": _snappy,
    b"zstandard": inflate_zstd,
}
