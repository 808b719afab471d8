"""Who may read and change the archive's files is the umask's to say, and nobody's whom it forgets."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from jetcapture_py.archive.layout import MARKER, ObjectName
from jetcapture_py.errors import StoreError
from jetcapture_py.store import LocalStore

NAME = ObjectName(stream="ORDERS", key="eu", bucket=0, first_seq=1, last_seq=1, rows=1, digest="0" * 16)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("mask", [0o027, 0o000])
def test_modes_follow_the_umask_and_are_never_writable_for_everybody(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        store = LocalStore(str(tmp_path / "archive"))
        store.probe()
        store.put(NAME, pa.py_buffer(b"x"))
        store.write_note("_watermark/ORDERS.json", b"{}")
        store.write_note("_watermark/ORDERS.json", b"{ }")
    found = list((tmp_path / "archive").rglob("*"))
    assert {path.name for path in found if path.is_file()} == {MARKER, Path(NAME.path).name, "ORDERS.json"}
    for path in (tmp_path / "archive", *found):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o664 if path.is_file() else 0o775) & ~mask, path
        assert not mode & stat.S_IWOTH


def test_a_place_where_no_directory_can_be_made_is_an_error_and_no_endless_attempt() -> None:
    with pytest.raises(StoreError, match="No such file or directory"):
        LocalStore("/proc/jetcapture/archive").probe()
