"""Commands take files, directories and configurations of many streams: one line a capture, the worst exit code."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.acceptance.test_run import command
from tests.integration.manage.api import ask, create
from tests.support.commands import jetcapture
from tests.support.documents import ARCHIVE, SERVER, blocks
from tests.support.nats_server import NatsServer
from tests.support.running import connection
from tests.support.several import fill, subject

STREAMS = ("ORDERS-1", "ORDERS-2", "OTHER")
MESSAGES = 40


def account(url: str, tmp_path: Path) -> Path:
    """The configuration of the page on accounts, with a decoder that may fail."""
    (block,) = blocks("docs/accounts.md", "yaml")
    assert len(block.text.splitlines()) <= 10
    path = tmp_path / "account.yaml"
    text = block.text.replace(SERVER, url).replace(ARCHIVE, str(tmp_path / "archive"))
    path.write_text(
        text.replace("compact: {}", "compact: {after: 0s, grace: 0s}") + "decode: {format: json}\nhttp: null\n"
    )
    return path


async def holding(url: str) -> None:
    """A bucket, an object store, a work queue and streams; in one of these a message that no decoder can read."""
    await fill(url, STREAMS, 0)
    async with connection(url) as client:
        stream = client.jetstream()
        for number in range(MESSAGES):
            for name in STREAMS:
                await stream.publish(subject(name), b'{"number": %d}' % number)
        await stream.publish(subject("OTHER"), b"no JSON")
        await (await stream.create_key_value(bucket="settings")).put("colour", b'{"number": 1}')
        await (await stream.create_object_store("files")).put("name", b"content")
    await create(url, {"name": "JOBS", "subjects": ["jobs.>"], "retention": "workqueue", "num_replicas": 1})


def records(text: str) -> dict[str, dict[str, Any]]:
    return {each["capture"]: each for each in map(json.loads, text.splitlines())}


def names(lines: str) -> list[str]:
    return [line.split()[0] for line in lines.splitlines()]


def of_account(streams: Iterable[str]) -> list[str]:
    return sorted(f"account.{name}" for name in streams)


ALL = of_account((*STREAMS, "KV_settings", "OBJ_files"))


def test_every_command_says_a_line_of_each_stream_of_an_account_and_fails_if_one_does(
    server: NatsServer, tmp_path: Path
) -> None:
    asyncio.run(holding(server.url))
    path = account(server.url, tmp_path)
    done = command("run", str(path), "--until-caught-up")
    assert done.returncode == 1, done.stderr  # the work queue is left out
    assert {each.name for each in (tmp_path / "archive").iterdir() if not each.name.startswith(("_", "."))} == {
        *STREAMS,
        "KV_settings",
        "OBJ_files",
    }
    checked = jetcapture("check", str(path))
    assert (names(checked.stdout), checked.returncode) == (sorted([*ALL, "account.JOBS"]), 0), checked
    assert "account.JOBS         left out: its retention is workqueue" in checked.stdout
    for words in (("verify",), ("apply",), ("objects",), ("maintain",), ("quarantine", "list")):
        done = jetcapture(*words, str(path))
        assert (names(done.stdout), done.returncode) == (ALL, 0), (words, done.stdout, done.stderr)
    some = jetcapture("check", str(path), "--json", "--stream", "ORDERS-1", "--stream", "OTHER")
    assert (sorted(records(some.stdout)), some.returncode) == (of_account(("ORDERS-1", "OTHER")), 0), some.stderr
    listed = jetcapture("status", str(path))
    assert (names(listed.stdout), listed.returncode) == (["capture", *ALL], 0), listed
    quarantined = records(jetcapture("quarantine", "list", str(path), "--json").stdout)
    assert {name: each["messages"] for name, each in quarantined.items() if each["messages"]} == {"account.OTHER": 1}
    erased = jetcapture("erase", str(path), "--subject", subject("ORDERS-2"), "--reason", "request 1", "--json")
    assert erased.returncode == 0, erased.stderr
    assert {name: each["messages"] for name, each in records(erased.stdout).items() if each["messages"]} == {
        "account.ORDERS-2": MESSAGES
    }
    one = ("--stream", "OTHER")
    complete = "complete: every one of 41 messages up to sequence 41"
    assert jetcapture("verify", str(path), *one).stdout.startswith(complete), "one stream is shown in full"
    assert "no JSON" in jetcapture("quarantine", "show", str(path), "41", *one).stdout
    for words, message in (
        (("tap",), "source.streams: expected a configuration of one stream, or --stream to choose one of many"),
        (("erase", "--seq", "3", "--reason", "request 2"), "expected one capture, got 5; --stream chooses one"),
    ):
        done = jetcapture(words[0], str(path), *words[1:])
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"jetcapture: {message}\n")
    (tmp_path / "archive" / "ORDERS-1").rename(tmp_path / "elsewhere")
    done = jetcapture("verify", str(path), "--json")
    codes = {name: each["exit_code"] for name, each in records(done.stdout).items()}
    assert (done.returncode, codes["account.ORDERS-1"], codes["account.OTHER"]) == (1, 1, 0)
    asyncio.run(ask(server.url, "STREAM.DELETE.ORDERS-2"))
    assert names(jetcapture("objects", str(path)).stdout) == of_account(
        ("ORDERS-2", "OTHER", "KV_settings", "OBJ_files")
    )
    assert "account.ORDERS-2" not in names(jetcapture("check", str(path)).stdout), "it is gone from the server"


def test_what_the_file_system_has_in_the_archive_is_no_stream_and_nothing_to_do_is_said(tmp_path: Path) -> None:
    path = account("nats://127.0.0.1:1", tmp_path)
    (tmp_path / "archive" / "lost+found").mkdir(parents=True)
    for words in (("maintain",), ("erase", "--key", "a", "--reason", "request 1")):
        done = jetcapture(words[0], str(path), *words[1:])
        assert (done.stdout, done.returncode) == ("", 0), words
        assert done.stderr == "no captures: the configuration selects no stream and no bucket\n"


def test_verify_fails_if_it_has_no_capture_to_prove(server: NatsServer, tmp_path: Path) -> None:
    done = jetcapture("verify", str(account(server.url, tmp_path)))
    assert (done.stdout, done.returncode) == ("", 1), done.stderr
    assert done.stderr == "no captures: the configuration selects no stream and no bucket\n"
