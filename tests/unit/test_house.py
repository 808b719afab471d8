"""The product's packages keep to the rules that let a reader find their way."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport

from jetcapture_py.jetstream.wire.client import NATS_PY

ROOT = Path(__file__).parents[2]
PACKAGES = ("jetcapture_py", "spark_jobs")
MAX_LINES = 600
MAX_MODULES = 13
PIPELINE = ROOT / "jetcapture_py" / "capture" / "pipeline.py"
MAX_PIPELINE_LINES = 149


def files(*packages: str) -> Iterator[Path]:
    for package in packages or PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def private_names(path: Path) -> set[str]:
    """Attributes with a leading underscore that the file uses of other objects than `self`."""
    return {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    }


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files()}
    assert {path: count for path, count in lines.items() if count > MAX_LINES} == {}


def test_the_pipeline_is_one_short_file_without_libraries() -> None:
    text = PIPELINE.read_text()
    assert len(text.splitlines()) <= MAX_PIPELINE_LINES
    nodes = list(ast.walk(ast.parse(text)))
    modules = {node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert {module.partition(".")[0] for module in modules} <= {"jetcapture_py", *sys.stdlib_module_names}


def test_parquet_is_opened_in_one_place() -> None:
    """`open_parquet` says why."""
    opening = {str(path.relative_to(ROOT)) for path in files() if "pq.ParquetFile(" in path.read_text()}
    assert opening == {"jetcapture_py/store/object_file.py"}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_has_few_modules_of_its_own(package: str) -> None:
    assert len(list((ROOT / package).glob("*.py"))) <= MAX_MODULES


def test_what_nats_py_keeps_private_is_used_in_two_packages_alone() -> None:
    nats = Client()
    theirs = {*dir(nats), *dir(TcpTransport()), *vars(Subscription(nats, 1))}  # type: ignore[no-untyped-call]
    private = {name for name in theirs if name.startswith("_") and not name.startswith("__")}
    own = ("jetcapture_py/jetstream/wire", "jetcapture_py/jetstream/publish")
    for path in files():
        if not str(path.relative_to(ROOT)).startswith(own):
            assert private_names(path) & private == set(), path


def test_no_version_of_nats_py_is_installed_that_is_refused() -> None:
    first, last = NATS_PY[0][:-1], NATS_PY[-1].split(".")
    pin = f"nats-py[nkeys]>={first},<{last[0]}.{int(last[1]) + 1}"
    assert pin in (ROOT / "pyproject.toml").read_text()
