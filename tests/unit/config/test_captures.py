"""Which configurations can run together in one process, and what stays when files change."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from jetcapture_py.config.captures import CaptureFiles
from jetcapture_py.errors import ConfigError
from tests.support.running import settings

CAPTURE = settings("nats://127.0.0.1:4222", "/archive")
del CAPTURE["http"], CAPTURE["log"]


def write(directory: Path, name: str, **sections: Any) -> Path:
    path = directory / f"{name}.yaml"
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(yaml.safe_dump({**CAPTURE, "source": {"stream": name.upper(), "consumer": "archive"}, **sections}))
    return path


def lines(*arguments: Path) -> tuple[str, ...]:
    """Why these files cannot be captured in one process."""
    with pytest.raises(ConfigError) as refused:
        CaptureFiles(arguments).select()
    return refused.value.problems


def test_a_directory_stands_for_its_yaml_files_that_are_not_hidden(tmp_path: Path) -> None:
    for name in ("b", "a", ".hidden", "below/c"):
        write(tmp_path / name.rpartition("/")[0], name.rpartition("/")[2])
    (tmp_path / "notes.txt").write_text("no configuration")
    (tmp_path / "d.yml").write_text((tmp_path / "a.yaml").read_text().replace("stream: A", "stream: D"))
    files = CaptureFiles([tmp_path, tmp_path / "a.yaml"])
    assert not files.single
    assert [capture.path.name for capture in files.select().configs] == ["a.yaml", "b.yaml", "d.yml"]
    (tmp_path / "empty").mkdir()
    (problem,) = lines(tmp_path / "empty")
    assert problem.endswith("expected files that end in .yaml or .yml, found none")


def test_a_single_file_is_reported_as_ever_and_several_name_theirs(tmp_path: Path) -> None:
    wrong = write(tmp_path, "wrong", key=5)
    also, right = write(tmp_path, "also", kye="a"), write(tmp_path, "right")
    assert lines(wrong, right, also) == tuple(f"{path}: {line}" for path in (wrong, also) for line in lines(path))


def test_files_that_cannot_run_together_are_reported_with_path_and_suggestion(tmp_path: Path) -> None:
    same: dict[str, Any] = {"source": {"stream": "FIRST", "consumer": "archive"}}
    elsewhere = {**same, "store": {"url": "/elsewhere"}, "nats": {"servers": ["tls://B:4222"]}}
    address = "http.listen: expected {}, as in {{first}}, got :2; one process has one address: leave it out"
    already = "{first} already captures stream FIRST with consumer archive"
    for first, second, problem in (
        ({}, same, f"{already} into this archive; remove one"),
        ({"nats": {"servers": ["nats://a:4222", "nats://b"]}}, elsewhere, f"{already}, and each archive would get"),
        ({"http": {"listen": ":1"}}, {"http": {"listen": ":2"}}, address.format(":1")),
        ({"http": {"listen": None}}, {"http": {"listen": ":2"}}, address.format("null")),
        ({"http": None}, {"http": {"listen": ":2"}}, address.format("null")),
        ({"log": {"level": "info"}}, {"log": {"level": "debug"}}, "log.level: expected info, as in {first}, got debug"),
    ):
        one, two = write(tmp_path, "first", **first), write(tmp_path, "second", **second)
        assert lines(one, two)[0].startswith(f"{two}: {problem.format(first=one)}")


def test_the_same_stream_is_captured_twice_with_another_consumer_or_login_or_server(tmp_path: Path) -> None:
    write(tmp_path, "first")
    write(tmp_path, "second", source={"stream": "FIRST", "consumer": "other"})
    tls = {"cert": "/certs/a.pem", "key": "/certs/a.key"}  # with verify_and_map, it selects the account
    logins: list[dict[str, Any]] = [{"user": "a", "password": "b"}, {"token": "c"}, {"tls": tls}, {"domain": "hub"}]
    for number, login in enumerate([*logins, {"servers": ["nats://127.0.0.1:4223"]}]):
        nats = {**CAPTURE["nats"], **login}
        source = {"stream": "FIRST", "consumer": "archive"}
        write(tmp_path, f"more{number}", nats=nats, source=source, store={"url": f"/elsewhere/{number}"})
    assert len(CaptureFiles([tmp_path]).select().configs) == 7


def test_captures_are_named_after_their_files_so_names_differ_and_leave_room_for_metrics(tmp_path: Path) -> None:
    one, two = write(tmp_path / "a", "same"), write(tmp_path / "b", "same", source={"stream": "B", "consumer": "c"})
    reserved = write(tmp_path, "metrics")
    odd = write(tmp_path, "odd").rename(tmp_path / os.fsdecode(b"caf\xe9.yaml"))
    why = "captures are named after their files, and"
    assert sorted(lines(one, two, reserved, odd)) == sorted(
        [
            f"{two}: {why} {one} is called same as well; rename one",
            f"{reserved}: {why} metrics is reserved; rename the file",
            f"{odd}: {why} this name is not printable; rename the file",
        ]
    )


def test_an_address_on_the_command_line_is_used_in_place_of_those_in_the_files(tmp_path: Path) -> None:
    write(tmp_path, "first", http={"listen": ":1"})
    write(tmp_path, "second", http=None)
    files = CaptureFiles([tmp_path], ":3")
    found = files.select()
    assert not found.problems
    assert (found.listen, found.listen_required) == (":3", True)
    with pytest.raises(ConfigError, match=r"^--http: expected an address and a port"):
        CaptureFiles([tmp_path], "nowhere")
    write(tmp_path, "first")
    write(tmp_path, "second", http={"listen": ":1"}, log={"level": "debug"})  # what one file states holds for all
    found = CaptureFiles([tmp_path]).select()
    assert (found.listen, found.log.level, found.log.format) == (":1", "debug", "auto")


def test_files_that_are_read_again_are_all_there_is_and_two_may_swap_their_streams(tmp_path: Path) -> None:
    for name in ("first", "second", "third"):
        write(tmp_path, name)
    files = CaptureFiles([tmp_path])
    write(tmp_path, "first", source={"stream": "SECOND", "consumer": "archive"})
    write(tmp_path, "second", source={"stream": "FIRST", "consumer": "archive"})
    (tmp_path / "third.yaml").unlink()
    found = files.again().select()
    assert [config.source.stream for config in found.configs.values()] == ["SECOND", "FIRST"]
    assert [config.source.stream for config in files.select().configs.values()] == ["FIRST", "SECOND", "THIRD"]


def test_what_is_gone_or_has_become_something_else_is_refused(tmp_path: Path) -> None:
    directory, file = write(tmp_path / "captures", "first").parent, write(tmp_path, "file")
    for files, path, problem in (
        (CaptureFiles([file, directory]), directory, f"{directory}: cannot be read: No such file or directory"),
        (CaptureFiles([file]), file, f"{file}: cannot be read: No such file or directory"),
    ):
        path.rename(tmp_path / f"{path.name} moved")
        with pytest.raises(ConfigError, match=f"^{problem}$"):
            files.again()
    write(file, "first")
    with pytest.raises(ConfigError, match=r"^source.streams: restart the process to change between one "):
        files.again()
