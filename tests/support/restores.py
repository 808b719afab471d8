"""A stream with everything that a restore has to bring back, and the comparison of two servers' answers.

Run as a module, it does the whole round once, with as many messages as wanted:

    python -m tests.support.restores [--messages 1000000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import yaml

from jetcapture_py import cli
from jetcapture_py.archive.schema import HEADERS_TYPE
from jetcapture_py.jetstream.publish.frames import header_blocks
from jetcapture_py.jetstream.publish.publisher import Publisher
from jetcapture_py.jetstream.wire.client import Connection
from jetcapture_py.restoring.request import RestoreRequest
from jetcapture_py.store.archive import ArchiveFiles
from tests.support.nats_server import NatsServer
from tests.support.running import STREAM, Command, remove_unfinished, settings

SUBJECTS = ("orders.>",)
HOT = 300
"""Messages that the stream keeps of a subject."""
Headers = list[tuple[str, list[str]]] | None

CONFIG = {
    "subjects": list(SUBJECTS),
    "max_msgs_per_subject": HOT,
    "allow_msg_ttl": True,
    "allow_direct": True,
    "description": "everything that a restore brings back",
    "storage": "file",
}


def headers_of(index: int) -> Headers:
    kinds: dict[int, Headers] = {
        1: [("Trace", [f"{index:032x}"])],
        2: [("A", ["1", "2", "1"]), ("Empty", [""]), ("Text", ["naïve: 値, a:b, \\ \t."])],
        3: [("Nats-Msg-Id", [f"id-{index}"])],
        4: [],
    }
    if index % 97 == 0:
        return [("Nats-TTL", ["1s"])]
    if index % 89 == 0:
        return [("Nats-TTL", ["24h"])]
    return kinds.get(index % 10)


def subject_of(index: int, count: int) -> str:
    """Few subjects are over the limit of messages that the stream keeps, some are not ASCII, some are purged."""
    if index % 20 == 0:
        return "orders.hot"
    if index % 50 == 7:
        return f"orders.purged.{index % 3}.{index // 10_000}"
    spread = max(1, count // 200)
    return f"orders.{('eu', 'été', '日本', 'us')[index % 4]}.{index % spread}"


def payload_of(index: int, source: random.Random) -> bytes:
    """JSON that is decoded, bytes that are not, nothing, and 1 MB, rarely."""
    if index % 9_973 == 17:
        return source.randbytes(1_000_000)
    if index % 10 == 5:
        return b""
    if index % 10 == 6:
        return source.randbytes(index % 300)
    return b'{"id": %d, "text": "%s"}' % (index, source.randbytes(index % 100).hex().encode())


async def fill(url: str, count: int, config: dict[str, Any] | None = None) -> None:
    """Publish `count` messages, and make gaps of all kinds."""
    client = Connection()
    await client.connect(url)
    source = random.Random(7)
    try:
        await api(client, f"STREAM.CREATE.{STREAM}", {"name": STREAM, **(config or CONFIG)})
        async with Publisher(client) as publisher:
            for start in range(0, count, 5000):
                numbers = range(start, min(start + 5000, count))
                await publisher.publish_batch(
                    pa.array([subject_of(index, count) for index in numbers]),
                    pa.array([payload_of(index, source) for index in numbers], pa.binary()),
                    header_blocks(pa.array(map(headers_of, numbers), HEADERS_TYPE), {}, len(numbers), stored=True),
                )
        raw = b"NATS/1.0\r\nno colon here\r\n\r\n"
        await client.write(b"HPUB orders.raw %d %d\r\n%b%b\r\n" % (len(raw), len(raw) + 3, raw, b"raw"))
        await client.write(b"PUB orders.\xff\xfe 5\r\nbytes\r\n")
        await client.write(rb"PUB orders.\xff." + b"\xfe 5\r\nbytes\r\n")
        await client.flush()
        await api(client, f"STREAM.PURGE.{STREAM}", {"filter": "orders.purged.1.>"})
        await api(client, f"STREAM.PURGE.{STREAM}", {"seq": count // 100 + 3})
        for seq in source.sample(range(count // 50, count), 200):
            await api(client, f"STREAM.MSG.DELETE.{STREAM}", {"seq": seq}, missing=True)
        async with asyncio.timeout(120):
            while await _with_ttl(client):
                await asyncio.sleep(0.2)
    finally:
        await client.close()


async def _with_ttl(client: Connection) -> bool:
    """Whether one of the last messages with a TTL of a second is still there."""
    last = int((await api(client, f"STREAM.INFO.{STREAM}"))["state"]["last_seq"])
    for seq in range(max(1, last - 2000), last + 1):
        if (seq - 1) % 97 == 0:
            found = await api(client, f"STREAM.MSG.GET.{STREAM}", {"seq": seq}, missing=True)
            if "message" in found:
                return True
    return False


async def api(client: Any, subject: str, body: dict[str, Any] | None = None, *, missing: bool = False) -> Any:
    data = b"" if body is None else json.dumps(body).encode()
    answer = json.loads((await client.request(f"$JS.API.{subject}", data, timeout=60)).data)
    assert missing or "error" not in answer, answer
    return answer


def capture(url: str, directory: Path, root: Path, kills: int) -> None:
    """Capture everything with two replicas, which are killed now and then."""
    directory.mkdir(exist_ok=True)
    configuration = settings(
        url,
        root,
        source={"ack_wait": "5s", "max_ack_pending": 20_000, "batch": 1000},
        decode={"format": "json", "columns": {"id": "int64", "text": "string"}},
        block={"interval": "5s", "max_age": "2s", "max_messages": 5000, "bundles": 2},
        key="{subject[1]}",
    )

    def stored() -> int:
        return len(list(root.rglob("*.parquet")))

    replicas = [Command(directory, configuration, name) for name in ("one", "two")]
    for replica in replicas:
        replica.start()
    try:
        for number in range(kills):
            before, deadline = stored(), time.monotonic() + 10
            while stored() == before and time.monotonic() < deadline:
                time.sleep(0.1)
            replicas[number % 2].kill()
            replicas[number % 2].start()
    finally:
        for replica in replicas:
            replica.kill()
    last = Command(directory, configuration, "last").start("--until-caught-up")
    assert last.wait(1200) == 0, last.log
    remove_unfinished(root)


def run(*words: str | Path) -> int:
    with patch.object(sys, "argv", ["jetcapture", *map(str, words)]):
        try:
            cli.main()
        except SystemExit as ended:
            return int(ended.code or 0)
    return 0


def main(words: Sequence[str]) -> int:
    return run("restore", *words)


def request(root: Path | str, stream: str = STREAM, **changes: Any) -> RestoreRequest:
    url = root if isinstance(root, str) else f"file://{root}"
    return RestoreRequest(**{"files": ArchiveFiles(url, {}), "stream": stream, "target": stream, **changes})


def compact_all(root: Path, directory: Path) -> None:
    """Compact all buckets; the configuration is written to `directory`."""
    file = directory / "compact.yaml"
    file.write_text(yaml.safe_dump(settings("nats://127.0.0.1:1", root, block={"interval": "5s"})))
    assert run("compact", file, "--incomplete", "--after", "0s", "--grace", "0s") == 0


async def state_of(url: str, stream: str) -> dict[str, Any]:
    """First and last sequence and time, messages and deleted messages, as the server says."""
    async with opened(url) as client:
        info = await api(client, f"STREAM.INFO.{stream}", {"deleted_details": True})
    wanted = ("first_seq", "first_ts", "last_seq", "last_ts", "messages", "num_deleted", "deleted", "num_subjects")
    return {name: info["state"].get(name) for name in wanted}


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Connection]:
    client = Connection()
    await client.connect(url)
    try:
        yield client
    finally:
        await client.close()


async def answers(url: str, stream: str, first: int, last: int) -> AsyncGenerator[dict[int, Any]]:
    async with opened(url) as client:
        found: dict[int, Any] = {}
        inbox = client.new_inbox()

        async def on_answer(message: Any) -> None:
            found[int(message.subject.rpartition(".")[2])] = json.loads(message.data)

        await client.subscribe(f"{inbox}.*", cb=on_answer)
        for start in range(first, last + 1, 5000):
            seqs = range(start, min(start + 5000, last + 1))
            for low in range(0, len(seqs), 500):
                for seq in seqs[low : low + 500]:
                    await client.publish(f"$JS.API.STREAM.MSG.GET.{stream}", b'{"seq":%d}' % seq, f"{inbox}.{seq}")
                async with asyncio.timeout(120):
                    while len(found) < min(low + 500, len(seqs)):
                        await asyncio.sleep(0.001)
            yield {seq: _content(found[seq]) for seq in seqs}
            found.clear()


def _content(answer: dict[str, Any]) -> Any:
    return answer["message"] if "message" in answer else answer["error"]["err_code"]


async def compare(
    one: str,
    other: str,
    stream: str,
    *,
    last: int | None = None,
    first: int | None = None,
    subject: Callable[[str], str] = lambda subject: subject,
) -> int:
    """Compare every message of `STREAM` on one server with those of `stream` on another; how many there are."""
    state = await state_of(one, STREAM)
    low, high = first or int(state["first_seq"]), last or int(state["last_seq"])
    compared = 0
    async with (
        aclosing(answers(one, STREAM, low, high)) as found,
        aclosing(answers(other, stream, low, high)) as theirs,
    ):
        async for ours in found:
            mirrored = await anext(theirs)
            for seq, message in ours.items():
                expected = {**message, "subject": subject(message["subject"])} if isinstance(message, dict) else message
                assert mirrored[seq] == expected, (seq, expected, mirrored[seq])
                compared += 1
    return compared


async def next_sequence(url: str, stream: str, subject: str) -> int:
    async with opened(url) as client:
        answer = json.loads((await client.request(subject, b"next", timeout=10)).data)
        assert answer["stream"] == stream, answer
        return int(answer["seq"])


def round_trip() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    options = parser.parse_args()

    def timed(what: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        print(f"{what}: {time.perf_counter() - began:.1f} s", flush=True)

    with (
        tempfile.TemporaryDirectory() as name,
        NatsServer(Path(name, "one")) as one,
        NatsServer(Path(name, "two")) as two,
    ):
        root = Path(name, "archive")
        for _ in timed("publish"):
            asyncio.run(fill(one.url, options.messages))
        for _ in timed("capture"):
            capture(one.url, Path(name, "replicas"), root, kills=6)
        for _ in timed("compact"):
            compact_all(root, Path(name))
        assert main([f"file://{root}", "--servers", two.url, "--allow-holes"]) == 0
        assert asyncio.run(state_of(one.url, STREAM)) == asyncio.run(state_of(two.url, STREAM))
        for _ in timed("compare"):
            print(asyncio.run(compare(one.url, two.url, STREAM)), "sequences are equal")
        subject = "orders.next"
        assert asyncio.run(next_sequence(one.url, STREAM, subject)) == asyncio.run(
            next_sequence(two.url, STREAM, subject)
        )


if __name__ == "__main__":
    round_trip()
