"""The spool: files for rows and objects, within their bound, and nothing of theirs left behind."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.archive.schema import REPLY
from jetcapture_py.archive.writer import ObjectWriter
from jetcapture_py.capture import spool as spool_module
from jetcapture_py.capture.spool import Spool, UsedUpError
from tests.unit.archive.test_writer import BLOCK, ENCODER, batch, plain, read

ROWS = batch(plain(1000), text=["größe", None] * 500)
SIZE = ROWS.remove_column(ROWS.schema.get_field_index(REPLY)).nbytes


def files(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file() and file.name != "lock"]


def settled(spool: Spool) -> Spool:
    """Wait for what the spool's thread has to do."""
    spool.threads.submit(lambda: None).result()
    return spool


def test_rows_come_back_as_they_were_and_lie_in_a_file(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", 10 * SIZE)
    before = pa.total_allocated_bytes()
    mapped, file = spool.write(ROWS)
    assert mapped.equals(ROWS)
    assert mapped.schema.equals(ROWS.schema)
    assert pa.total_allocated_bytes() - before < 100_000, "the ack subjects alone are in memory"
    assert spool.bytes == SIZE
    assert len(files(tmp_path)) == 1
    file.release()
    file.release()
    assert settled(spool).bytes == 0
    assert files(tmp_path) == []
    assert mapped.equals(ROWS), "who still reads them can"
    spool.close()
    assert list((tmp_path / "spool").iterdir()) == []


def test_rows_that_cannot_be_written_are_salvaged_into_the_spool_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = ObjectWriter.write

    def failing(self: ObjectWriter, table: pa.Table) -> None:
        write(self, table)
        if layout.ERROR not in table.schema.names:
            raise pa.ArrowInvalid("after some bytes")

    monkeypatch.setattr(ObjectWriter, "write", failing)
    spool = Spool(tmp_path / "spool", 10 * SIZE)
    sink = spool.sink()
    encoded = ENCODER.encode_or_salvage(BLOCK, "age", [ROWS], sink=sink)
    assert (encoded.name.quarantine, encoded.in_file, encoded.messages) == (True, True, 1000)
    assert spool.bytes == encoded.data.size
    assert read(encoded).column("error").to_pylist() == ["ArrowInvalid: after some bytes"] * 1000
    sink.close()
    spool.close()


def test_a_slice_takes_only_its_own_room(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 10 * SIZE)
    mapped, _ = spool.write(ROWS.slice(100, 10))
    assert mapped.equals(ROWS.slice(100, 10))
    assert spool.bytes < SIZE / 50
    spool.close()


def test_the_files_never_exceed_the_size_and_leave_room_for_the_objects(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 5 * SIZE)
    kept = [spool.write(ROWS) for _ in range(2)]
    assert not spool.has_room(SIZE)
    with pytest.raises(OSError, match="size is used up") as caught:
        spool.write(ROWS)
    assert caught.value.errno == errno.ENOSPC
    sink = spool.sink()
    sink.write(b"x" * SIZE * 2)
    assert not sink.failed
    assert spool.bytes == 4 * SIZE
    with pytest.raises(OSError, match="size is used up"):
        sink.write(b"x" * (SIZE + 1))
    assert sink.failed
    sink.close()
    assert spool.bytes == 2 * SIZE
    for _, file in kept:
        file.release()
    assert settled(spool).bytes == 0
    assert sum(file.stat().st_size for file in files(tmp_path)) == 0
    spool.close()


def test_room_is_kept_for_rows_in_memory_that_join_the_object(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 5 * SIZE, resident=3 * SIZE)
    spool.write(ROWS)
    assert not spool.has_room(1)
    spool.close()


def test_an_object_is_gone_with_its_last_use(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 10 * SIZE)
    sink = spool.sink()
    assert sink.write(pa.py_buffer(b"abc")) == 3
    assert sink.tell() == 3
    data = sink.getvalue()
    sink.close()
    memoryview(data).cast("B")[1:2] = b"X"
    assert data.to_pybytes() == b"aXc"
    assert spool.bytes == 3
    assert files(tmp_path) == []
    del data
    gc.collect()
    assert spool.bytes == 0
    spool.close()


def test_the_garbage_collector_may_free_an_object_while_the_spool_counts(tmp_path: Path) -> None:
    program = f"""
import faulthandler, gc
from pathlib import Path
from tests.unit.capture.test_spool import Spool
faulthandler.dump_traceback_later(30, exit=True)
gc.disable()
spool = Spool(Path({str(tmp_path)!r}), 1 << 20)
sink = spool.sink()
sink.write(b"abc")
cycle = [sink.getvalue()]
cycle.append(cycle)
sink.close()
del cycle

class Collecting(int):
    def __add__(self, other):
        gc.collect()
        return int(self) + other
    __radd__ = __add__

spool.took(Collecting(5))
print(spool.bytes)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("5\n", 0), done.stderr


def test_the_number_of_files_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_module, "MOST_FILES", 2)
    spool = Spool(tmp_path, 100 * SIZE)
    kept = [spool.write(ROWS.slice(0, 1))[1] for _ in range(2)]
    assert not spool.has_room(1)
    with pytest.raises(UsedUpError):
        spool.write(ROWS)
    assert spool.has_room(1, spare=False), "a file that replaces another"
    kept[0].release()
    assert settled(spool).has_room(1)
    spool.close()


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    program = f"""
import resource, signal, sys
from pathlib import Path
from tests.unit.capture.test_spool import ROWS, Spool, files
spool = Spool(Path({str(tmp_path)!r}), 1 << 30)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
for write in (lambda: spool.write(ROWS), lambda: spool.sink().write(bytes(20_000))):
    try:
        write()
    except OSError as error:
        print(error.errno)
spool.threads.submit(print, files(Path({str(tmp_path)!r}))).result()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == [str(errno.EFBIG), str(errno.EFBIG), "[]", ""]


HOLD = """
import sys, time
from pathlib import Path
from tests.unit.capture.test_spool import ROWS, Spool
spool = Spool(Path(sys.argv[1]), 1 << 30)
kept = spool.write(ROWS)
print("ready", flush=True)
time.sleep(600)
"""


def test_directories_of_dead_processes_are_removed_and_those_of_others_are_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        assert len(files(tmp_path)) == 2
        processes[0].kill()
        processes[0].wait()
        (tmp_path / "notes.txt").write_text("not ours")
        (tmp_path / ".jetcapture-old12345").mkdir()
        (tmp_path / ".jetcapture-new12345").mkdir()
        os.utime(tmp_path / ".jetcapture-old12345", (0, 0))
        spool = Spool(tmp_path, 1 << 20)
        spool.open()
        assert sorted(path.name for path in files(tmp_path)) == ["0.arrow", "notes.txt"]
        assert len([path for path in tmp_path.iterdir() if path.name.startswith("jetcapture-")]) == 2
        assert (tmp_path / ".jetcapture-new12345").exists()
        assert not (tmp_path / ".jetcapture-old12345").exists()
        spool.close()
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    "name", ["jetcapture-archive", "jetcapture-12345678", ".jetcapture-archive", ".jetcapture-12345678"]
)
def test_directories_of_others_keep_everything_that_is_in_them(tmp_path: Path, name: str) -> None:
    kept = tmp_path / name / "ORDERS" / "key=eu" / "1.parquet"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"an object")
    (tmp_path / name / "notes").write_text("kept")
    os.utime(tmp_path / name, (0, 0))
    spool = Spool(tmp_path, 1 << 20)
    spool.open()
    spool.close()
    assert kept.read_bytes() == b"an object"
    assert (tmp_path / name / "notes").read_text() == "kept"


def test_room_is_kept_for_objects_that_are_larger_than_their_rows(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 10 * SIZE, growth=4)
    for _ in range(2):
        spool.write(ROWS)
    assert not spool.has_room(1)
    sink = spool.sink()
    sink.write(b"x" * 8 * SIZE)
    assert not sink.failed
    sink.close()
    spool.close()


def test_a_directory_is_locked_before_anybody_may_take_it_for_abandoned(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 1 << 20)
    spool.open()
    (directory,) = tmp_path.iterdir()
    with (directory / "lock").open("rb") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert time.time() - directory.stat().st_mtime < 3600
    spool.close()


def test_the_disk_must_have_room_for_the_object_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = os.statvfs(tmp_path)
    values = list(disk)
    values[0] = values[1] = 1
    values[4] = SIZE + SIZE // 2  # blocks of one byte that are free

    def statvfs(path: Path) -> os.statvfs_result:
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", statvfs)
    spool = Spool(tmp_path, 100 * SIZE)
    with pytest.raises(OSError, match="No space left on device"):
        spool.write(ROWS)
    assert spool.bytes == 0
    values[4] = 2 * SIZE
    assert spool.write(ROWS)[0].column(layout.SEQ).equals(ROWS.column(layout.SEQ))
    spool.close()
