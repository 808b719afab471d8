"""`get`: where a file of an object store is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jetcapture_py.config.model import Config, load
from jetcapture_py.errors import ConfigError, JetcaptureError
from jetcapture_py.manage.files import run_get
from tests.support.object_stores import store_file

LONG = "x" * 300


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """An archive with files; the working directory is `work`."""
    root, work = tmp_path / "archive", tmp_path / "work"
    for number, name in enumerate(("old.txt", f"dir/{LONG}", "dir/-")):
        store_file(root, name, b"contents", seq=2 * number + 1)
    path = tmp_path / "config.yaml"
    path.write_text(
        json.dumps({"source": {"object_store": "files", "consumer": "archive"}, "store": {"url": str(root)}})
    )
    work.mkdir()
    monkeypatch.chdir(work)
    return load(path)


UNWRITABLE = [
    (".", r"cannot write \.: Is a directory"),
    ("/", "cannot write /: Is a directory"),
    ("..", r"cannot write \.\.: Is a directory"),
    (LONG, f"cannot write {LONG}: File name too long"),
    ("missing/x", "cannot write missing/x: No such file or directory"),
]


def test_an_output_that_cannot_be_written_is_refused_in_one_line(config: Config) -> None:
    for output, problem in UNWRITABLE:
        with pytest.raises(JetcaptureError, match=f"^{problem}$"):
            run_get(config, "old.txt", Path(output), as_of=None)
        assert not list(Path().iterdir())


def test_a_name_that_is_too_long_for_a_file_needs_an_output(config: Config) -> None:
    with pytest.raises(ConfigError, match=r"^--output: required: x+ exists, or cannot be a file's name$"):
        run_get(config, f"dir/{LONG}", None, as_of=None)
    assert run_get(config, f"dir/{LONG}", Path("short"), as_of=None) == 0
    assert Path("short").read_bytes() == b"contents"


def test_a_broken_link_is_not_overwritten_without_an_output(config: Config) -> None:
    Path("old.txt").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=r"^--output: required: old\.txt exists"):
        run_get(config, "old.txt", None, as_of=None)
    assert Path("old.txt").is_symlink()


def test_only_an_output_of_a_dash_is_stdout(config: Config, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    run_get(config, "dir/-", None, as_of=None)
    assert Path("-").read_bytes() == b"contents"
    assert capsysbinary.readouterr().out == b"-: 8 bytes\n"
    run_get(config, "old.txt", Path("-"), as_of=None)
    assert capsysbinary.readouterr().out == b"contents"
