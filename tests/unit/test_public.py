"""The public interface: what `from jetcapture_py import …` gives, and to type checkers as well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import jetcapture_py

ROOT = Path(__file__).parents[2]


def test_every_public_name_is_there_and_nothing_else() -> None:
    for name in jetcapture_py.__all__:
        assert getattr(jetcapture_py, name) is not None
        assert name in dir(jetcapture_py)
    with pytest.raises(AttributeError, match="has no attribute 'Captures'"):
        _ = jetcapture_py.Captures  # type: ignore[attr-defined]


def test_importing_the_package_imports_nothing_more() -> None:
    program = (
        "import sys, jetcapture_py; assert not [n for n in sys.modules if n.startswith(('jetcapture_py.', 'pyarrow'))]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.exhaustive
def test_type_checkers_see_the_public_names(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--ignore-missing-imports", str(tmp_path / "use.py")]
    program = (ROOT / "examples" / "custom_decoder.py").read_text()
    wrong = program.replace("key=site", "key=config")
    for text, answer in ((program, "Success"), (wrong, 'Argument "key" to "Capture"')):
        (tmp_path / "use.py").write_text(text)
        assert answer in subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT).stdout
