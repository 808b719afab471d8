"""Azure's blob storage, as Azurite plays it."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from azure.storage.blob import BlobServiceClient

from tests.support.ports import await_listening, free_port

NAME = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account that every Azurite has, as its documentation says; no secret."""
URL = "az://archive/nats"
"""Where `upload` puts an archive."""


@contextlib.contextmanager
def serve(home: Path) -> Iterator[str]:
    """An Azurite with its files in `home`; a connection string. Skips the test where there is none."""
    binary = shutil.which("azurite-blob")
    if binary is None:
        pytest.skip("azurite-blob is not on the PATH (npm install --global azurite)")
    port = free_port()
    command = [binary, "--blobPort", str(port), "--location", str(home), "--silent", "--skipApiVersionCheck"]
    log = home / "azurite.log"
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            await_listening(process, port, log)
            yield (
                f"DefaultEndpointsProtocol=http;AccountName={NAME};AccountKey={KEY};"
                f"BlobEndpoint=http://127.0.0.1:{port}/{NAME};"
            )
        finally:
            process.terminate()


def upload(connection: str, root: Path) -> None:
    with BlobServiceClient.from_connection_string(connection) as service:
        container = service.create_container("archive")
        for path in sorted(root.rglob("*.parquet")):
            container.upload_blob(f"nats/{path.relative_to(root)}", path.read_bytes())
