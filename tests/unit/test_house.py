"""The product's packages keep to the rules that let a reader find their way."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport

ROOT = Path(__file__).parents[2]
PACKAGES = ("jetcapture_py", "spark_jobs")
MAX_LINES = 600
MAX_MODULES = 13


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


def test_a_package_has_few_modules_of_its_own() -> None:
    for package in PACKAGES:
        assert len(list((ROOT / package).glob("*.py"))) <= MAX_MODULES


def test_what_nats_py_keeps_private_is_used_in_two_packages_alone() -> None:
    nats = Client()
    theirs = {*dir(nats), *dir(TcpTransport()), *vars(Subscription(nats, 1))}  # type: ignore[no-untyped-call]
    private = {name for name in theirs if name.startswith("_") and not name.startswith("__")}
    own = ("jetcapture_py/jetstream/wire", "jetcapture_py/jetstream/publish")
    for path in files():
        if not str(path.relative_to(ROOT)).startswith(own):
            assert private_names(path) & private == set(), path
