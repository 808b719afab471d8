from __future__ import annotations

from pathlib import Path

import pytest

from jetcapture_py.errors import JetcaptureError
from spark_jobs.restoring.arguments import RestoreCommand, parse

SECOND = 1_777_636_800
"""2026-05-01T12:00:00Z."""


def parsed(*words: str) -> RestoreCommand:
    return parse(["file:///a", "ORDERS", *words])


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [
        ("2026-05-01T12:00:00Z", 0),
        ("2026-05-01T12:00:00.123456789Z", 123_456_789),
        ("2026-05-01T12:00:00.1234567Z", 123_456_700),
        ("2026-05-01T14:00:00.000001+02:00", 1_000),
    ],
)
def test_a_time_has_nanoseconds(text: str, nanoseconds: int) -> None:
    assert parsed("--to-time", text).until == SECOND * 10**9 + nanoseconds


def test_names_sequences_and_prefixes_are_read() -> None:
    found = parsed(
        "--from-seq", "7", "--to-seq", "9", "--consumer", "a=0", "--consumer", "b=8", "--subject-prefix", "x.y."
    )
    assert (found.target, found.first, found.last) == ("ORDERS", 7, 9)
    assert (found.consumers, found.prefix) == ([("a", 0), ("b", 8)], "x.y.")
    assert parsed("--as", "COPY", "--subject-prefix", "x").prefix == "x."


@pytest.mark.parametrize(
    "words",
    [
        ["--from-seq", "0"],
        ["--to-seq", "-1"],
        ["--from-seq", "9", "--to-seq", "8"],
        ["--to-time", "lately"],
        ["--consumer", "a"],
        ["--consumer", "a.b=1"],
        ["--consumer", "a=1", "--consumer", "a=2"],
        ["--subject-prefix", "a..b"],
        ["--subject-prefix", "$JS.API"],
        ["--as", "a b"],
        ["--allow-drops", "--without-limits"],
        ["--with-schedules", "--as", "COPY"],
        ["--with-schedules", "--subject-prefix", "copy"],
    ],
)
def test_what_cannot_be_meant_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        parsed(*words)
    assert refused.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_the_only_stream_of_an_archive_need_not_be_named(tmp_path: Path) -> None:
    for name in ("ORDERS", "_watermark", "_streams", ".hidden"):
        (tmp_path / name).mkdir()
    assert parse([f"file://{tmp_path}"]).stream == "ORDERS"
    (tmp_path / "OTHER").mkdir()
    assert parse([f"file://{tmp_path}", "--as", "OTHER"]).stream == "OTHER"
    with pytest.raises(JetcaptureError, match=r"has 2 streams: name one; there are: ORDERS, OTHER"):
        parse([f"file://{tmp_path}", "--as", "COPY"])
