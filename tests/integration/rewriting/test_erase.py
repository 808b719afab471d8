"""What is erased is gone from every object and copy, whatever happens meanwhile, and nothing else changes."""

from __future__ import annotations

import asyncio
import gzip
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nats.js.api import StreamSource

from jetcapture_py.archive import layout
from jetcapture_py.compaction.files import Files
from jetcapture_py.config.model import Config
from jetcapture_py.reading.arrow import read_archive
from jetcapture_py.rewriting import erase as module
from jetcapture_py.rewriting.erase import Erasure, erase
from jetcapture_py.rewriting.selectors import KeySelector, Selector, SequenceSelector, SubjectSelector
from jetcapture_py.store.archive import open_archive
from jetcapture_py.verify.findings import Kind
from jetcapture_py.verify.proof import verify
from jetcapture_py.verify.repair import verify_and_repair
from tests.support.archives import merge
from tests.support.nats_server import NatsServer
from tests.support.running import (
    STREAM,
    Message,
    capture_all,
    connection,
    objects,
    publish,
    publish_and_capture,
    remove_unfinished,
)

Start = Callable[..., NatsServer]
COUNT = 300
SETTINGS: dict[str, Any] = {
    "key": "{subject[1]}",
    "decode": {"format": "json", "columns": {"id": "int64", "text": "string"}, "keep_payload": True},
    "block": {"max_messages": 41, "interval": "1d"},
}
WHO = "Erika Mustermann"
REASON = "request 4711"
KEY = KeySelector("b", SETTINGS["key"])


def message(number: int) -> Message:
    """One in ten cannot be decoded; every customer has a key."""
    body = json.dumps({"id": number, "text": f'a "quoted"\nline of {WHO if number % 7 == 0 else number}'})
    return f"orders.{'abc'[number % 3]}", b"no" if number % 10 == 0 else body.encode(), [("N", str(number))]


def captured(start: Start, root: Path, count: int = COUNT, **sections: Any) -> Config:
    block = {**SETTINGS["block"], **sections.pop("block", {})}
    messages = [message(number) for number in range(count)]
    return publish_and_capture(start().url, root, messages, **{**SETTINGS, "block": block, **sections})


def run(config: Config, select: Selector | str = KEY, **options: Any) -> Erasure:
    return asyncio.run(erase(config, select, REASON, **options))


def read(root: Path) -> dict[int, dict[str, Any]]:
    """Every row of the archive and its quarantine, by sequence; none is there twice."""
    rows = [
        row
        for aside in (False, True)
        for row in read_archive(str(root), STREAM, quarantine=aside).read_all().to_pylist()
    ]
    found = {row[layout.SEQ]: row for row in rows}
    assert len(found) == len(rows)
    return found


def proven(config: Config, erased: int) -> None:
    """Check that nothing is missing, and that no erased message can be read."""
    report = asyncio.run(verify(config, deep=True))
    assert (report.complete, report.count(Kind.ERASED), report.exit_code(strict=True)) == (True, erased, 0)


def contents(root: Path) -> Iterator[bytes]:
    """The bytes of every file of an archive, text and pages as they are when they are not compressed."""
    for path in root.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            yield gzip.decompress(data) if path.name.endswith(".gz") else data


SELECTORS: dict[str, tuple[Selector | str, Callable[[int], bool]]] = {
    "key": (KEY, lambda number: number % 3 == 1),
    "subject": (SubjectSelector("*.c"), lambda number: number % 3 == 2),
    "seq": (SequenceSelector(7, 23), lambda number: 6 <= number < 23),
    "where": (
        f"_nats_payload = 'no'::BLOB AND _nats_seq = 211 OR decode(_nats_payload) LIKE '%{WHO}%'",
        lambda number: (number % 7 == 0 and number % 10 != 0) or number == 210,
    ),
}


@pytest.mark.parametrize("block", [{}, {"bundles": 2}], ids=["keys", "bundles"])
@pytest.mark.parametrize("name", SELECTORS)
def test_a_selector_erases_its_messages_and_no_other_row_changes(
    nats_server: Start, tmp_path: Path, name: str, block: dict[str, Any]
) -> None:
    root, (select, gone) = tmp_path / "a", SELECTORS[name]
    config = captured(nats_server, root, block={**block, "compression": "none"})
    before, names = read(root), objects(root)
    expected = {seq: row for seq, row in before.items() if not gone(seq - 1)}
    dry = run(config, select, dry_run=True)
    assert (objects(root), (root / "_erased").exists()) == (names, False)
    done = run(config, select)
    assert not done.everything
    assert (dry.messages, dry.copies) == (done.messages, done.copies)
    assert {(each.path, each.messages) for each in dry.objects} == {(each.path, each.messages) for each in done.objects}
    assert done.messages == len(before) - len(expected)
    assert read(root) == expected
    proven(config, done.messages)
    assert not any(b'"N":' in data and WHO.encode() in data for data in contents(root / "_erased"))
    after = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    again = run(config, select)
    assert (again.messages, again.objects, again.everything) == (0, [], [])
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == after


@pytest.mark.parametrize(
    "block", [{"format": "ndjson"}, {"format": "csv", "compression": "none"}], ids=["ndjson", "csv"]
)
def test_lines_of_text_objects_go_and_the_others_stay_to_the_byte(
    nats_server: Start, tmp_path: Path, block: dict[str, Any]
) -> None:
    root = tmp_path / "a"
    config = captured(
        nats_server, root, block={**block, "bundles": 2}, decode={**SETTINGS["decode"], "keep_payload": False}
    )
    before = b"".join(contents(root / STREAM))
    done = run(config, f"text LIKE '%{WHO}%'")
    # the quarantine has no such column, which is said
    assert [text.partition(":")[0] for text in done.everything] == ["the view quarantine"]
    assert done.messages == len([number for number in range(COUNT) if number % 7 == 0 and number % 10])
    after = b"".join(contents(root / STREAM))
    assert WHO.encode() not in after
    text = before.decode().splitlines()
    kept = [line for line in text if WHO not in line]
    if block["format"] == "ndjson":
        assert sorted(after.decode().splitlines()) == sorted(kept)
    proven(config, done.messages)
    assert not run(config).everything
    erased = asyncio.run(verify(config)).count(Kind.ERASED)
    assert erased == len([number for number in range(COUNT) if number % 3 == 1 or (number % 7 == 0 and number % 10)])
    assert not run(config, SequenceSelector(1, COUNT)).everything
    assert objects(root) == []


class KilledError(Exception):
    """The process is killed here."""


def kill_at(monkeypatch: pytest.MonkeyPatch, step: int) -> list[str]:
    """Make what changes the archive fail before or after step `step`; the steps until then."""
    steps: list[str] = []

    def stepped(name: str) -> None:
        steps.append(name)
        if len(steps) == step:
            raise KilledError

    def wrapped(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def work(*arguments: Any, **named: Any) -> Any:
            stepped(f"before {name}")
            found = real(*arguments, **named)
            stepped(f"after {name}")
            return found

        monkeypatch.setattr(owner, name, work)

    for owner, name in ((Files, "put"), (Files, "overwrite"), (Files, "remove"), (module, "change_note")):
        wrapped(owner, name)
    monkeypatch.setattr(module, "THREADS", 1)
    return steps


@pytest.mark.parametrize("format_", ["parquet", "ndjson"])
def test_killed_at_every_step_and_run_again_it_ends(nats_server: Start, tmp_path: Path, format_: str) -> None:
    count, original = 40, tmp_path / "original"
    config = captured(nats_server, original, count, block={"max_messages": 11, "bundles": 1, "format": format_})
    step, seen = 0, set()
    while True:
        step += 1
        root = tmp_path / str(step)
        shutil.copytree(original, root)
        own = config.model_copy(update={"store": config.store.model_copy(update={"url": str(root)})})
        with pytest.MonkeyPatch.context() as monkeypatch:
            steps = kill_at(monkeypatch, step)
            try:
                run(own)
            except KilledError:
                seen.add(steps[-1])
            else:
                break
        remove_unfinished(root)
        report = asyncio.run(verify(own))
        stored = (report.complete and report.count(Kind.DUPLICATES) == 0) or step > 2
        assert stored and not report.count(Kind.HOLES)
        # another selection ends what was begun
        done = run(own, KEY if step % 2 else SequenceSelector(count + 1, count + 1))
        assert not done.everything
        if step > 1:
            proven(own, len([number for number in range(count) if number % 3 == 1]))
        assert not {seq for seq in range(1, count + 1) if (seq - 1) % 3 == 1 and step > 1} & set(positions(own))
        assert len(positions(own)) == count - (0 if step == 1 and not step % 2 else count // 3)
        shutil.rmtree(root)
    assert {"before change_note", "after change_note", "before remove", "after remove"} <= seen


def positions(config: Config) -> list[int]:
    """The sequences of all stored messages, with copies."""
    from jetcapture_py.verify.examine import ObjectExaminer

    archive = open_archive(config.store.url, {})
    files = [file for file in archive.files(STREAM) if file.name is not None]
    return [
        seq
        for file in files
        if file.name
        for seq in ObjectExaminer(archive, None).identities(file, file.name)[1].tolist()
    ]


def test_copies_of_a_compaction_are_erased_also_those_it_makes_meanwhile(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "a"
    config = captured(nats_server, root, key="", block={"max_messages": 60})
    before = read(root)
    names = [name for name in objects(root) if not name.quarantine]
    merge(root, names, keep=True)  # killed before it removed what it replaces
    kept = {root / name.path: (root / name.path).read_bytes() for name in names}
    real, rounds = module.remove_replaced, []

    def removed(*arguments: Any) -> Any:
        result = real(*arguments)
        if not rounds:  # it had read them before
            for path, data in kept.items():
                path.write_bytes(data)
        rounds.append(result)
        return result

    monkeypatch.setattr(module, "remove_replaced", removed)
    done = run(config, SubjectSelector("orders.b"))
    assert len(rounds) > 1
    assert (done.messages, done.everything) == (100, [])
    assert read(root) == {seq: row for seq, row in before.items() if seq % 3 != 2}
    proven(config, 100)


def test_nothing_brings_erased_messages_back(nats_server: Start, tmp_path: Path) -> None:
    root = tmp_path / "a"
    config = captured(nats_server, root)
    run(config)
    other = config.model_copy(update={"source": config.source.model_copy(update={"consumer": "other"})})
    asyncio.run(capture_all(other))
    asyncio.run(reset(config))
    asyncio.run(capture_all(config))
    report, _ = asyncio.run(verify_and_repair(config, deep=True, content=True))
    assert (report.complete, report.count(Kind.ERASED)) == (True, 100)
    assert not [seq for seq in positions(config) if (seq - 1) % 3 == 1]


async def reset(config: Config) -> None:
    async with connection(config.nats.servers[0]) as client:
        await client.jetstream().delete_consumer(STREAM, config.source.consumer)


def seqs_of(url: str, stream: str = STREAM) -> list[int]:
    async def ask() -> list[int]:
        found = []
        async with connection(url) as client:
            js = client.jetstream()
            state = (await js.stream_info(stream)).state
            for seq in range(state.first_seq, state.last_seq + 1):
                try:
                    found.append((await js.get_msg(stream, seq)).seq or 0)
                except Exception:  # there is none
                    continue
        return found

    return asyncio.run(ask())


def test_in_the_stream_only_the_messages_themselves_are_deleted(nats_server: Start, tmp_path: Path) -> None:
    root = tmp_path / "a"
    config = captured(nats_server, root, 30)
    url = config.nats.servers[0]
    dry = run(config, in_stream=True, dry_run=True)
    done = run(config, in_stream=True)
    assert dry.in_stream and done.in_stream
    assert (dry.in_stream.deleted, done.in_stream.deleted, done.everything) == (10, 10, [])
    assert seqs_of(url) == [seq for seq in range(1, 31) if seq % 3 != 2]
    proven(config, 10)
    again = run(config, in_stream=True)
    assert again.in_stream and (again.in_stream.deleted, again.everything) == (0, [])

    async def recreated() -> None:
        async with connection(url) as client:
            await client.jetstream().delete_stream(STREAM)
        await publish(url, [message(number) for number in range(30)])

    asyncio.run(recreated())
    later = run(config, in_stream=True)
    assert later.in_stream and later.in_stream.deleted == 0
    assert len(seqs_of(url)) == 30


def test_a_stream_that_deletes_nothing_and_its_copies_remain(nats_server: Start, tmp_path: Path) -> None:
    root = tmp_path / "a"
    config = captured(nats_server, root, 30)
    url = config.nats.servers[0]

    async def changed() -> None:
        async with connection(url) as client:
            js = client.jetstream()
            await js.add_stream(name="MIRROR", mirror=StreamSource(name=STREAM))
            await js.add_stream(name="COPY", sources=[StreamSource(name=STREAM)])
            info = await js.stream_info(STREAM)
            info.config.deny_delete = True
            await js.update_stream(info.config)
            while (await js.stream_info("MIRROR")).state.messages < 30:
                await asyncio.sleep(0.02)

    asyncio.run(changed())
    done = run(config, in_stream=True)
    assert done.in_stream and done.in_stream.deleted == 0
    assert sorted(done.everything) == [
        "stream COPY sources ORDERS and may have copies under other sequences",
        "stream MIRROR, a mirror of ORDERS, has 10 messages of them",
        "stream ORDERS has 10 messages of them: it is deny_delete, and deletes none",
    ]
    assert not done.remains  # in the archive
    proven(config, 10)
