"""The public interface: what `from jetcapture_py import …` gives, and to type checkers as well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import jetcapture_py

USE = """
import asyncio
from pathlib import Path
import pyarrow as pa
from jetcapture_py import Capture, Config, Decoded, Decoder, Failure, KeyFunction, MessageBatch, Store, layout, load

class Payloads:
    def decode(self, batch: MessageBatch) -> Decoded:
        payloads: pa.BinaryArray = batch.column(layout.PAYLOAD)
        failures = (Failure(index=0, stage="", error=""),)
        return Decoded(fields=pa.RecordBatch.from_pydict({"text": payloads}), failures=failures)

def key(batch: MessageBatch, fields: pa.RecordBatch) -> pa.StringArray:
    return pa.array(["eu"] * len(batch))

def make(config: Config, store: Store) -> Capture:
    decoder: Decoder = Payloads()
    function: KeyFunction = key
    return Capture(config, decoder=decoder, key=function, store=store)

config: Config = load(Path("capture.yaml"))

async def run() -> None:
    await Capture(config).run(asyncio.Event(), until_caught_up=True)
"""


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


def checked(tmp_path: Path, program: str) -> str:
    pytest.importorskip("mypy")
    (tmp_path / "use.py").write_text(program)
    command = [sys.executable, "-m", "mypy", "--strict", "--ignore-missing-imports", str(tmp_path / "use.py")]
    root = Path(__file__).parents[2]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=root).stdout


@pytest.mark.exhaustive
def test_type_checkers_see_the_public_names(tmp_path: Path) -> None:
    (tmp_path / "use.py").write_text(USE)
    assert "Success" in checked(tmp_path, USE)
    assert 'Argument "key" to "Capture"' in checked(tmp_path, USE.replace("key=function", "key=decoder"))
