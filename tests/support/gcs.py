"""Google Cloud Storage, as fake-gcs-server plays it.

That has no PUT of the XML API, with which obstore writes; a server before it makes an upload of the JSON API of it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlencode

import pytest

from tests.support.ports import await_listening, free_port

_CONDITION = "x-goog-if-generation-match"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    port = 0

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
        method, path = self.command, self.path
        if method == "PUT":
            bucket, _, name = path.lstrip("/").partition("/")
            query = {"uploadType": "media", "name": unquote(name)}
            if self.headers[_CONDITION]:
                query["ifGenerationMatch"] = self.headers[_CONDITION]
            method, path = "POST", f"/upload/storage/v1/b/{bucket}/o?{urlencode(query)}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "date", "server", "connection"):
                self.send_header(name, value)
        if self.command == "PUT" and answer.status == 200:
            self.send_header("ETag", json.loads(content)["etag"])
            self.send_header("x-goog-generation", json.loads(content)["generation"])
        if not answer.getheader("Content-Length"):
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815  names of http.server

    def log_request(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def serve(home: Path) -> Iterator[str]:
    """A server; its address. Skips the test where there is none."""
    binary = shutil.which("fake-gcs-server")
    if binary is None:
        pytest.skip("fake-gcs-server is not on the PATH (go install github.com/fsouza/fake-gcs-server@v1.56.1)")
    port = free_port()
    command = [binary, "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory"]
    command += ["-public-host", f"127.0.0.1:{port}", "-log-level", "warn"]

    class Handler(_Handler):
        pass

    Handler.port = port
    log = home / "fake-gcs-server.log"
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        try:
            await_listening(process, port, log)
            with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
                thread = threading.Thread(target=server.serve_forever)
                thread.start()
                try:
                    yield f"http://127.0.0.1:{server.server_port}"
                finally:
                    server.shutdown()
                    thread.join()
        finally:
            process.kill()


def request(endpoint: str, method: str, path: str, body: bytes = b"") -> bytes:
    connection = http.client.HTTPConnection(endpoint.removeprefix("http://"))
    connection.request(method, path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    assert answer.status == 200, content
    return content
