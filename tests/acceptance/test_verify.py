"""`jetcapture verify` as a user meets it: the command, what it prints, its exit code; and nothing damaged passes it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

from jetcapture_py.archive import layout
from jetcapture_py.config.model import load
from jetcapture_py.verify.findings import Kind
from jetcapture_py.verify.proof import verify
from tests.support.nats_server import NatsServer
from tests.support.proofs import named_files, unchecked
from tests.support.running import (
    CONSUMER,
    STREAM,
    capture_all,
    config,
    objects,
    publish,
    publish_and_capture,
    rows,
    settings,
)

Start = Callable[..., NatsServer]
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
PERMISSIONS = (Path(__file__).parents[2] / "examples" / "nats-permissions.conf").read_text()


def captured(nats_server: Start, tmp_path: Path, keys: list[str], count: int = 300, **sections: Any) -> Path:
    server = nats_server()
    messages = [(f"orders.{keys[index % len(keys)]}", b"%d" % index, None) for index in range(count)]
    sections = {"key": "{subject[1]}", **sections}
    publish_and_capture(server.url, tmp_path / "a", messages, **sections)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings(server.url, tmp_path / "a", **sections)))
    return path


def run(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "jetcapture_py", "verify", str(path), *options]
    strict = {**os.environ, "PYTHONWARNINGS": "error"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False, env=strict)
    assert not CONTROL.search(done.stdout), done.stdout
    return done


def test_the_exit_code_the_first_line_and_the_json_are_the_verdict(nats_server: Start, tmp_path: Path) -> None:
    path = captured(nats_server, tmp_path, ["a", "b"])
    whole = run(path)
    assert (whole.returncode, whole.stderr) == (0, "")
    assert whole.stdout.startswith("complete: every one of 300 messages up to sequence 300 (")
    found = json.loads(run(path, "--json").stdout)
    assert (found["verdict"], found["exit_code"], found["findings"]) == ("complete", 0, [])
    assert [found["counts"][name] for name in ("missing", "duplicates", "stored")] == [0, 0, 300]
    foreign = tmp_path / "a" / STREAM / "notes.txt"
    foreign.write_text("hello")
    assert run(path).returncode == 0
    strict = run(path, "--strict")
    assert strict.returncode == 1
    assert f"  {STREAM}/notes.txt" in strict.stdout.splitlines()
    foreign.unlink()
    first, second = objects(tmp_path / "a")
    (tmp_path / "a" / first.path).unlink()
    broken = run(path, "--deep")
    assert (broken.returncode, broken.stderr) == (1, "")
    assert broken.stdout.startswith("NOT complete: 150 messages in 150 holes")
    assert f"\n  1 to 299, 150 messages in 150 holes, {rows(tmp_path / 'a')[0]['_nats_timestamp']:%Y-}" in broken.stdout
    data = bytearray((tmp_path / "a" / second.path).read_bytes())
    data[len(data) // 2] ^= 4
    (tmp_path / "a" / second.path).write_bytes(data)
    broken = run(path, "--json", "--deep")
    found = json.loads(broken.stdout)
    assert broken.returncode == 1
    assert (found["verdict"], found["exit_code"], found["counts"]["missing"]) == ("incomplete", 1, 300)
    holes, damaged = (next(each for each in found["findings"] if each["kind"] == kind) for kind in ("holes", "damaged"))
    assert (holes["severity"], damaged["severity"]) == ("failure", "failure")
    assert [(hole["first"], hole["last"], hole["messages"]) for hole in holes["ranges"]] == [(1, 300, 300)]
    assert holes["ranges"][0]["first_time"].startswith("20")
    assert [each["path"] for each in damaged["paths"]] == [second.path]


def test_a_wrong_configuration_is_2_and_a_place_that_cannot_be_listed_is_1(nats_server: Start, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("source: {stream: ORDERS}\n")
    assert run(path).returncode == 2
    path.write_text(yaml.safe_dump(settings(nats_server().url, path / "a")))  # below a file
    failed = run(path)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert re.match(rf"jetcapture: cannot .*{path}/a.*\n$", failed.stderr), failed.stderr


# ------------------------------------------------------------------ every one of 100 objects


def removed(path: Path, _: random.Random) -> None:
    path.unlink()


def truncated(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def flipped(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    footer = int.from_bytes(data[-8:-4], "little") + 8
    place = len(data) - chance.randrange(1, footer) if chance.random() < 0.5 else chance.randrange(len(data))
    data[place] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def renamed(path: Path, chance: random.Random) -> None:
    bucket, first, last, count, digest = path.name.split("-")
    other_key = path.parents[2].with_name(f"key=other{chance.randrange(1000)}")
    choices = [
        path.with_name(f"x{chance.randrange(1 << 60)}.parquet"),
        path.with_suffix(".bak"),
        path.with_name("-".join((bucket, f"{int(first) + 1:020}", last, count, digest))),
        path.with_name("-".join((bucket, first, f"{int(last) + 7:020}", count, digest))),
        path.with_name("-".join((bucket, first, last, count, "0" * 16 + ".parquet"))),
        path.with_name("-".join((bucket, first, last, str(int(count) + 1), digest))),
        other_key / path.relative_to(path.parents[2]),
        path.parents[1] / "hour=99" / path.name,
    ]
    target = chance.choice(choices)
    target.parent.mkdir(parents=True, exist_ok=True)
    path.rename(target)


def test_every_one_of_a_hundred_objects_that_was_tampered_with_is_found(nats_server: Start, tmp_path: Path) -> None:
    chance = random.Random(1)
    path = captured(nats_server, tmp_path, [str(key) for key in range(10)], 3000, block={"max_messages": 12})
    root = tmp_path / "a"
    names = objects(root)
    victims = chance.sample(names, 100)
    held = {name: pq.ParquetFile(root / name.path).read([layout.SEQ])[layout.SEQ].to_pylist() for name in names}
    for index, name in enumerate(victims):
        (removed, truncated, flipped, renamed)[index % 4](root / name.path, chance)
    report = asyncio.run(verify(load(path), deep=True))
    lost = {seq for name in victims for seq in held[name]}
    assert len(names) > 150
    assert {seq for hole in report.ranges(Kind.HOLES) for seq in range(hole.first, hole.last + 1)} == lost
    assert (report.missing, report.stored) == (len(lost), 3000 - len(lost))
    damaged, foreign = {problem.path for problem in report.paths(Kind.DAMAGED)}, {*named_files(report, Kind.FOREIGN)}
    assert {name.path for index, name in enumerate(victims) if index % 4 in (1, 2)} <= damaged
    assert len(damaged) + len(foreign) == 75
    assert not damaged & {name.path for name in names if name not in victims}


# ------------------------------------------------------------------ permissions


def test_the_permissions_of_the_example_are_enough_and_a_missing_one_is_named(
    nats_server: Start, tmp_path: Path
) -> None:
    verifier = re.search(r"^VERIFIER: {.*?^}", PERMISSIONS, re.MULTILINE | re.DOTALL)
    assert verifier is not None
    remarks = dict(re.findall(r'^    "([^"]+)"(.*)$', verifier[0], re.MULTILINE))
    allowed = {subject: "may be left out" in remark for subject, remark in remarks.items()}
    assert f"$JS.API.CONSUMER.INFO.{STREAM}.{CONSUMER}" in allowed
    for number, without in enumerate([None, *allowed]):
        text = verifier[0]
        for subject, optional in allowed.items():
            if subject == without or (optional and without is not None):
                text = text.replace(f'"{subject}"', '"not.used"')
        users = "{user: admin, password: admin}, {user: verifier, password: v, permissions: $VERIFIER}"
        server = nats_server(f"{text}\naccounts: {{ APP: {{ jetstream: enabled, users: [{users}] }} }}")
        admin, root = server.url.replace("nats://", "nats://admin:admin@"), tmp_path / f"archive-{number}"
        asyncio.run(publish(admin, [("orders.a", b"x", None)] * 60))
        login = {"user": "admin", "password": "admin"}
        asyncio.run(capture_all(config(server.url, root, nats=login, block={"max_messages": 20})))
        victim = objects(root)[0]
        (root / victim.path).unlink()
        login = {"user": "verifier", "password": "v", "inbox_prefix": "_INBOX_verifier"}
        report = asyncio.run(verify(config(server.url, root, nats=login)))
        server.stop()
        if without is None or allowed[without]:
            assert (report.proven, report.missing) == (True, victim.rows)
        else:
            assert not report.proven
            assert not report.complete
            named = without.replace("*", "").lower()
            assert any(named in note.lower() for note in unchecked(report)), unchecked(report)
            assert "no longer has them" not in report.as_text()
