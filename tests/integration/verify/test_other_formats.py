"""The proof of objects that are not Parquet: by their rows, by their names, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.verify.findings import Kind, Report
from jetcapture_py.verify.proof import verify
from tests.support.nats_server import NatsServer
from tests.support.proofs import losses_of, named_files, unchecked
from tests.support.running import STREAM, capture_all, connection, objects, publish, publish_and_capture

Start = Callable[..., NatsServer]

HERE = "tests.integration.verify.test_other_formats"


class Lines:
    suffix = ".lines"

    def write(self, table: pa.Table) -> bytes:
        rows = zip(table[layout.SEQ].to_pylist(), table[layout.TIMESTAMP].cast(pa.int64()).to_pylist(), strict=True)
        return "".join(f"{seq} {time}\n" for seq, time in rows).encode()


def captured(nats_server: Start, root: Path, writer: str, subjects: str = "a", **sections: Any) -> Any:
    """A capture of 60 messages, one by one of each of `subjects`."""
    server = nats_server()
    sent = [(f"orders.{subjects[index % len(subjects)]}", b"x", None) for index in range(60)]
    block = {"format": "csv", "compression": "none"} if writer == "csv" else {"format": f"{HERE}:{writer}"}
    return publish_and_capture(server.url, root, sent, block=block, **{"key": "", **sections})


def proof(settings: Any) -> Report:
    return asyncio.run(verify(settings))


def test_text_is_proven_by_its_rows(nats_server: Start, tmp_path: Path) -> None:
    root, decode = tmp_path / "archive", {"format": "raw", "keep_payload": True}
    settings = captured(nats_server, root, "csv", "ab", key="{subject[1]}", decode=decode)
    found = proof(settings)
    assert (found.complete, found.stored) == (True, 60)
    assert not any("names" in note for note in unchecked(found))
    first, second = (root / name.path for name in objects(root))
    lines = first.read_bytes().splitlines(keepends=True)
    for broken in (lines[:-1], [b"1 1\n", *lines[1:]], [b"nonsense\n"], [], lines[::-1], [second.read_bytes()]):
        first.write_bytes(b"".join(broken))
        found = proof(settings)
        assert [root / each.path for each in found.paths(Kind.DAMAGED)] == [first]
        assert (found.complete, found.missing) == (False, 30)
    first.write_bytes(b"".join(lines))
    second.unlink()
    assert proof(settings).missing == 30


def test_what_a_users_writer_wrote_holds_what_its_name_says_and_the_report_says_so(
    nats_server: Start, tmp_path: Path
) -> None:
    settings = captured(nats_server, tmp_path / "archive", "Lines")
    found = proof(settings)
    assert (found.complete, found.stored) == (True, 60)
    assert "1 object in a format of your own: only their names were checked" in unchecked(found)
    found = proof(settings.model_copy(update={"block": settings.block.model_copy(update={"format": "parquet"})}))
    assert named_files(found, Kind.FOREIGN) == (objects(tmp_path / "archive")[0].path,)
    assert found.missing == 60

    async def again() -> None:
        async with connection(settings.nats.servers[0]) as client:
            await client.jetstream().delete_stream(STREAM)
        await publish(settings.nats.servers[0], [("orders.a", b"x", None)] * 10)
        await capture_all(settings)

    asyncio.run(again())
    found = proof(settings)
    assert (losses_of(found), found.exit_code()) == ((), 0), "not taken for a rewind"
    assert "what the server has lost: of some objects, only the names could be checked" in unchecked(found)


def test_an_object_that_nothing_reads_proves_nothing_where_its_name_leaves_it_open(
    nats_server: Start, tmp_path: Path
) -> None:
    found = proof(captured(nats_server, tmp_path / "archive", "Lines", "ab", key="{subject[1]}"))
    assert (found.complete, found.missing) == (False, 60)
