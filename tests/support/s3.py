"""S3, as moto plays it, and archives in it."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
import s3fs  # type: ignore[import-untyped]
from moto.server import ThreadedMotoServer

CREDENTIALS = {"key": "dummy", "secret": "dummy-secret"}


@contextlib.contextmanager
def serve() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        for fs in list(s3fs.S3FileSystem._cache.values()):
            if fs._s3 is not None:
                s3fs.S3FileSystem.close_session(fs.loop, fs._s3)
        s3fs.S3FileSystem.clear_instance_cache()
        server.stop()


def upload(endpoint: str, root: Path) -> str:
    client = _client(endpoint)
    bucket = f"bucket-{uuid.uuid4().hex}"
    client.create_bucket(Bucket=bucket)
    for path in sorted(root.rglob("*.parquet")):
        client.put_object(Bucket=bucket, Key=f"nats/{path.relative_to(root)}", Body=path.read_bytes())
    client.close()
    return f"s3://{bucket}/nats"


def arguments(endpoint: str) -> list[str]:
    options = {**CREDENTIALS, "endpoint_url": endpoint}
    return [word for name, value in options.items() for word in ("--option", f"{name}={value}")]


def names(endpoint: str, url: str) -> list[str]:
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    client = _client(endpoint)
    found = client.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/").get("Contents", [])
    client.close()
    return [entry["Key"] for entry in found]


def _client(endpoint: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=CREDENTIALS["key"],
        aws_secret_access_key=CREDENTIALS["secret"],
        region_name="us-east-1",
    )
