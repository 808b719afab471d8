"""The proof of archives with bundles, and of archives with several layouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from jetcapture_py.archive.bundles import bundle_text
from jetcapture_py.verify.findings import Kind
from jetcapture_py.verify.proof import verify
from tests.support.nats_server import NatsServer
from tests.support.running import Message, capture_all, config, objects, publish

Start = Callable[..., NatsServer]
KEYS = 40


def orders(count: int) -> list[Message]:
    return [(f"orders.{index % KEYS}", b'{"n":1}', None) for index in range(count)]


async def test_a_bucket_in_three_layouts_is_complete_and_each_message_counts_once(
    nats_server: Start, tmp_path: Path
) -> None:
    """Keys, then 4 bundles, then 8, whose names have as many digits, then 16: each has copies of all messages."""

    server, root = nats_server(), tmp_path / "archive"
    await publish(server.url, orders(400))
    numbers = (0, 4, 8, 16)
    for number in numbers:
        block = {"bundles": number, "interval": "1d"}
        source = {"consumer": f"archive{number}"}
        settings = config(server.url, root, key="{subject[1]}", block=block, source=source)
        await capture_all(settings)
    report = await verify(settings, deep=True)
    assert (report.complete, report.exit_code()) == (True, 0)
    assert (report.stored, report.missing, report.count(Kind.READ_TWICE)) == (400, 0, 0)
    assert report.count(Kind.DUPLICATES) == 3 * 400
    names = {number: f"in {number} bundles" if number else "under keys" for number in numbers}
    counts = {number: report.layouts[name] for number, name in names.items()}
    assert len(report.layouts) == len(numbers)
    assert set(counts) == set(numbers)
    assert sum(counts.values()) == len(objects(root)) == report.objects
    (line,) = (line for line in report.as_text().splitlines() if line.startswith("layouts: "))
    assert line.startswith(f"layouts: {counts[0]} objects under keys, ")
    assert f"{counts[16]} objects in 16 bundles" in line
    assert json.loads(report.as_json())["layouts"]["in 16 bundles"] == counts[16]


async def test_an_object_in_the_directory_of_another_number_of_bundles_is_damaged(
    nats_server: Start, tmp_path: Path
) -> None:
    server, root = nats_server(), tmp_path / "archive"
    await publish(server.url, orders(400))
    settings = config(server.url, root, key="{subject[1]}", block={"bundles": 4})
    await capture_all(settings)
    for name, bundle in zip(objects(root), (bundle_text(3, 16), "7"), strict=False):
        moved = root / name.path.replace(f"bundle={name.bundle}", f"bundle={bundle}")
        moved.parent.mkdir(parents=True)
        (root / name.path).rename(moved)
    report = await verify(settings)
    assert not report.complete
    assert [each.reason.partition(",")[0] for each in report.paths(Kind.DAMAGED)] == ["its footer says bundles '4'"] * 2
