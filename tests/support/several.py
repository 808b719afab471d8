"""Several captures in one process: their streams, their configuration files, and the real command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.support.publishing import Publisher
from tests.support.running import Command, connection, settings


def subject(stream: str) -> str:
    return f"{stream.lower()}.new"


async def fill(url: str, streams: Sequence[str], count: int, first: int = 0) -> None:
    """Create streams where they are missing, and publish `count` messages to each: `first`, `first` + 1, …"""
    async with connection(url) as client:
        for stream in streams:
            await client.jetstream().add_stream(name=stream, subjects=[subject(stream)])
        async with Publisher(client) as publisher:
            for number in range(first, first + count):
                for stream in streams:
                    await publisher.publish(subject(stream), b"%d" % number, None)
            await publisher.flush()


def of_stream(url: str, stream: str, archive: Path, **sections: Any) -> dict[str, Any]:
    return settings(url, archive, source={"stream": stream, **sections.pop("source", {})}, **sections)


def write(directory: Path, name: str, configuration: Mapping[str, Any]) -> Path:
    """Write a configuration file as a whole, as Kubernetes does it."""
    directory.mkdir(exist_ok=True)
    path = directory / f"{name}.yaml"
    hidden = directory / f".{name}"
    hidden.write_text(yaml.safe_dump(dict(configuration)))
    hidden.replace(path)
    return path


def process(directory: Path, environment: Mapping[str, str] | None = None) -> Command:
    """The command that runs all files of a directory; its log is beside it."""
    command = Command(directory.parent, {}, f"process-{directory.name}", environment)
    command.path = directory
    return command
