"""What a mended configuration can decode moves from the quarantine to the archive, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from jetcapture_py.archive import layout
from jetcapture_py.archive.inferred import InferredColumns
from jetcapture_py.archive.writer import EncodedBlock
from jetcapture_py.capture.recapture import Recapture
from jetcapture_py.config.model import Config, parse
from jetcapture_py.errors import JetcaptureError, StoreError
from jetcapture_py.manage import quarantine
from jetcapture_py.manage.many import show_one
from jetcapture_py.reading.arrow import read_archive
from jetcapture_py.rewriting.redecode import QuarantineSelection, Redecoded, redecode
from jetcapture_py.store import LocalStore
from jetcapture_py.store.archive import ArchiveFiles, File
from jetcapture_py.verify.findings import Kind
from jetcapture_py.verify.proof import verify
from tests.support.erasing import bury
from tests.support.nats_server import NatsServer
from tests.support.running import STREAM, Message, objects, publish_and_capture, settings

Start = Callable[..., NatsServer]

COLUMNS = {"id": "int64", "amount": "int64"}
FAULTY: dict[str, Any] = {
    "key": "{subject[1]}",
    "decode": {"format": "json", "columns": COLUMNS},
    "block": {"time": "header.X-At", "interval": "1h"},
}
MENDED = FAULTY | {
    "decode": {"format": "json", "columns": COLUMNS | {"amount": "double"}, "compression": "auto"},
    "block": FAULTY["block"] | {"time_fallback": "timestamp"},
}
BAD_JSON, BAD_ID, FRACTION, PACKED, UNTIMED = range(0, 10, 2)
"""By the last digit of its number, what is wrong with a message: the last three can be mended."""
STAYS = (BAD_JSON, BAD_ID)


def message(number: int) -> Message:
    kind = number % 10
    headers = [("X-At", f"2026-05-01T{number % 3:02}:00:00Z"), ("N", str(number))]
    body: dict[str, Any] = {"id": number, "amount": number}
    body |= {"id": "none"} if kind == BAD_ID else {"amount": number + 0.5} if kind == FRACTION else {}
    data = b"not JSON %d" % number if kind == BAD_JSON else json.dumps(body).encode()
    data = gzip.compress(data) if kind == PACKED else data
    return f"orders.{'abc'[number % 3]}", data, headers[1:] if kind == UNTIMED else headers


def captured(start: Start, root: Path, count: int = 100, **block: Any) -> Config:
    """Capture with the faulty configuration, and return the mended one."""
    url, messages = start().url, [message(number) for number in range(count)]
    publish_and_capture(url, root, messages, **(FAULTY | {"block": FAULTY["block"] | block}))
    return parse(settings(url, root, **(MENDED | {"block": MENDED["block"] | block})))


def run(config: Config, *reasons: str, dry_run: bool = False) -> Redecoded:
    return asyncio.run(redecode(config, QuarantineSelection(reasons=reasons), dry_run=dry_run))


def read(root: Path, *, quarantine: bool = False) -> list[dict[str, Any]]:
    rows = read_archive(str(root), STREAM, quarantine=quarantine).read_all().to_pylist()
    return sorted(rows, key=lambda row: (row[layout.SEQ], row[layout.TIMESTAMP]))


def in_one_place(root: Path, count: int) -> None:
    """Check that each message is in exactly one place, and in the right one."""
    archived, left = read(root), read(root, quarantine=True)
    assert [row[layout.SEQ] - 1 for row in archived] == [n for n in range(count) if n % 10 not in STAYS]
    assert [row[layout.SEQ] - 1 for row in left] == [n for n in range(count) if n % 10 in STAYS]


def test_what_can_be_decoded_is_archived_with_its_own_identity(nats_server: Start, tmp_path: Path) -> None:
    root, count = tmp_path / "a", 1000
    config = captured(nats_server, root, count, bundles=2)
    before = {row[layout.SEQ]: row for row in read(root, quarantine=True)}
    dry = run(config, dry_run=True)
    assert {row[layout.SEQ]: row for row in read(root, quarantine=True)} == before
    done = run(config)
    assert (dry.messages, dry.decoded, dry.failed) == (done.messages, done.decoded, done.failed) == (500, 300, 200)
    in_one_place(root, count)
    for row in read(root):
        number = row[layout.SEQ] - 1
        assert (row["id"], row["key"]) == (number, "abc"[number % 3])
        assert row["amount"] == number + 0.5 * (number % 10 == FRACTION)
        if (old := before.get(number + 1)) is not None:
            same = set(layout.ENVELOPE)
            assert {name: row[name] for name in same} == {name: old[name] for name in same}
            assert (row["date"] == "2026-05-01") is (number % 10 != UNTIMED)
    report = asyncio.run(verify(config, deep=True, content=True))
    assert (report.complete, report.stored, report.quarantined, report.exit_code(strict=True)) == (True, count, 200, 0)
    assert report.count(Kind.QUARANTINE, Kind.DUPLICATES, Kind.READ_TWICE) == 0
    names = objects(root)
    again = run(config)
    assert (again.messages, again.decoded, again.failed, again.objects, again.removed) == (200, 0, 200, 0, 0)
    assert objects(root) == names


@pytest.mark.parametrize("format_", ["ndjson", "csv"])
def test_text_objects_are_stored_as_well(nats_server: Start, tmp_path: Path, format_: str) -> None:
    config = captured(nats_server, tmp_path / "a", format=format_)
    assert run(config).decoded == 30
    report = asyncio.run(verify(config))
    assert (report.complete, report.stored, report.quarantined, report.count(Kind.DUPLICATES)) == (True, 100, 20, 0)


def test_columns_that_are_then_inferred_have_their_types_in_the_archive(nats_server: Start, tmp_path: Path) -> None:
    config = captured(nats_server, tmp_path / "a")
    inferred = parse(config.model_dump(mode="json", exclude_unset=True, by_alias=True) | {"decode": {"format": "json"}})
    file = tmp_path / "a" / "_columns" / STREAM / f"{config.source.consumer}.json"
    run(inferred, dry_run=True)
    assert not file.exists()
    run(inferred)
    assert json.loads(file.read_text())["types"].keys() == {"id", "amount"}


def test_a_dry_run_knows_the_types_of_the_archive(nats_server: Start, tmp_path: Path) -> None:
    config = captured(nats_server, tmp_path / "a")
    decode = {"decode": {"format": "json", "on_conflict": "quarantine"}}
    strict = parse(config.model_dump(mode="json", exclude_unset=True, by_alias=True) | decode)
    types = InferredColumns(stream=STREAM, consumer=config.source.consumer, types={"id": "bool"}).encode()
    LocalStore(str(tmp_path / "a")).write_note(f"_columns/{STREAM}/{config.source.consumer}.json", types)
    dry, done = run(strict, dry_run=True), run(strict)
    assert (dry.decoded, dry.failed) == (done.decoded, done.failed) == (0, 50)


def test_what_stays_has_the_new_reason_unless_it_was_not_selected(nats_server: Start, tmp_path: Path) -> None:
    root = tmp_path / "a"
    config = captured(nats_server, root)
    csv = {"decode": {"format": "csv", "columns": {"x": "int64"}}}
    other = parse(config.model_dump(mode="json", exclude_unset=True, by_alias=True) | csv)
    reasons = {row[layout.SEQ]: row["error"] for row in read(root, quarantine=True)}
    done = run(other, "JSON is malformed: invalid character (byte N)")
    assert (done.messages, done.decoded, done.failed) == (10, 0, 10)
    now = {row[layout.SEQ]: row["error"] for row in read(root, quarantine=True)}
    assert {seq for seq, error in now.items() if reasons[seq] != error} == {seq for seq in now if seq % 10 == 1}
    assert run(config).decoded == 30
    in_one_place(root, 100)


def test_nothing_leaves_the_quarantine_that_is_not_in_the_archive(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "a"
    config = captured(nats_server, root)
    before = read(root, quarantine=True)

    async def put(_self: Recapture, _encoded: EncodedBlock) -> None:
        """A store that keeps nothing."""

    with monkeypatch.context() as patched:
        patched.setattr(Recapture, "put", put)
        with pytest.raises(StoreError, match="none was removed from the quarantine"):
            run(config)
    assert read(root, quarantine=True) == before
    run(config)
    in_one_place(root, 100)


def test_a_removal_that_fails_is_not_called_removed(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = captured(nats_server, tmp_path / "a")

    def deny(_: ArchiveFiles, file: File) -> None:
        raise StoreError(f"cannot remove {file.path}: denied")

    monkeypatch.setattr(ArchiveFiles, "remove", deny)
    for archived in (False, True):  # the second time, all are in the archive before
        assert show_one(quarantine.run_redecode(config, QuarantineSelection(), dry_run=False)) == 1
        lines = capsys.readouterr().out.splitlines()
        assert ("30 messages were in the archive before" in lines) is archived
        assert not any("removed from" in line for line in lines)
        assert "messages that are archived now are still in the quarantine as well:" in lines
        assert any(line.startswith("  cannot remove _quarantine/") for line in lines)


def test_what_was_erased_is_not_brought_back(nats_server: Start, tmp_path: Path) -> None:
    root = tmp_path / "a"
    config = captured(nats_server, root)
    gone = [row for row in read(root, quarantine=True) if (row[layout.SEQ] - 1) % 20 == PACKED]
    bury(root, gone)
    done = run(config)
    assert (done.messages, done.decoded, done.failed) == (45, 25, 20)
    assert not {row[layout.SEQ] for row in gone}.intersection(row[layout.SEQ] for row in read(root))


def test_the_commands_say_why_and_what_was_done(
    nats_server: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = captured(nats_server, tmp_path / "a")

    def shown(done: Any, *, as_json: bool = False) -> Any:
        assert show_one(done, as_json=as_json) == 0
        lines = capsys.readouterr().out.splitlines()
        return json.loads(lines[0]) if as_json else lines

    listed = shown(quarantine.run_list(config), as_json=True)
    assert (listed["messages"], [reason["messages"] for reason in listed["reasons"]]) == (50, [10] * 5)
    malformed = next(reason for reason in listed["reasons"] if "malformed" in reason["error"])
    assert malformed["error"] == "JSON is malformed: invalid character (byte N)"
    assert malformed["example"] == {"sequence": 1, "error": "JSON is malformed: invalid character (byte 4)"}
    assert malformed["subjects"] == {"orders.a": 4, "orders.b": 3, "orders.c": 3}
    assert shown(quarantine.run_list(config))[-1] == "50 messages of stream ORDERS in quarantine"
    lines = shown(quarantine.run_show(config, FRACTION + 1))
    assert lines[1] == "reason: decode: Expected `int | null`, got `float` - at `$.amount`"
    assert "    00000000  7b 22 69 64 22 3a 20 34 2c 20 22 61 6d 6f 75 6e  {" + '"id": 4, "amoun' in lines
    assert lines[-1] == "    id=4  amount=4.5"
    fields = shown(quarantine.run_show(config, BAD_JSON + 1), as_json=True)
    assert base64.b64decode(fields["payload_base64"]) == b"not JSON 0"
    assert fields["today"]["quarantine"]["stage"] == fields["stage"] == "decode"
    with pytest.raises(JetcaptureError, match=r"the quarantine of stream ORDERS has no message 2$"):
        quarantine.run_show(config, 2)
    chosen = QuarantineSelection(reasons=["no matter", "time: "])
    done = shown(quarantine.run_redecode(config, chosen, dry_run=False), as_json=True)
    assert (done["messages"], done["decoded"], done["failed"]) == (10, 10, 0)
    later = QuarantineSelection(start=datetime(2200, 1, 1, tzinfo=UTC))
    nothing = "0 messages of the quarantine: 0 decoded and archived in 0 objects"
    assert shown(quarantine.run_redecode(config, later, dry_run=False)) == [nothing]
    planned = ["40 messages of the quarantine: 20 would be decoded and archived", "20 messages cannot be decoded:"]
    assert shown(quarantine.run_redecode(config, QuarantineSelection(), dry_run=True))[:2] == planned


def test_what_cannot_be_decoded_again_is_refused_in_one_line(tmp_path: Path) -> None:
    own = {"block": {"format": "examples.arrow_writer:ArrowWriter"}}
    for sections, reason in ((own, "cannot be read back, which redecode needs$"), ({}, "no archive of stream ORDERS")):
        with pytest.raises(JetcaptureError, match=reason):
            run(parse(settings("nats://127.0.0.1:4222", tmp_path, **sections)))
