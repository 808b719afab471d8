"""A peer that cannot show who it is gets nothing: no login, no object, and no second chance by default."""

from __future__ import annotations

import asyncio
import http.server
import re
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from jetcapture_py.capture.pipeline import Capture
from jetcapture_py.errors import JetcaptureError, StoreError
from jetcapture_py.store import open_store
from tests.support.credentials import certificate
from tests.support.drivers import options_for
from tests.support.nats_server import NatsServer
from tests.support.running import config

Start = Callable[..., NatsServer]
FAULTS = {
    "unknown authority": r"certificate verify failed: (unable to get local issuer|self-signed)",
    "wrong host": r"certificate verify failed: IP address mismatch",
    "expired": "certificate verify failed: certificate has expired",
}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`good` and what is wrong with the others, by the names in `FAULTS`; `ca.pem` has issued all but one."""
    directory = tmp_path_factory.mktemp("certificates")
    authority, other = certificate(directory, "ca", None), certificate(directory, "other", None)
    certificate(directory, "good", authority)
    certificate(directory, "unknown authority", other)
    certificate(directory, "wrong host", authority, host="127.0.0.2")
    certificate(directory, "expired", authority, age=2)
    return directory


def secured(certificates: Path, name: str, more: str = "") -> str:
    """The configuration of a server with that certificate, where nobody logs in without a password."""
    pair = f'cert_file: "{certificates}/{name}.pem", key_file: "{certificates}/{name}-key.pem"'
    return f"tls {{ {pair} {more} }}\nauthorization {{ user: app, password: s3cret }}\ndebug: true, trace: true"


def refusals(archive: Path, attempts: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """What captures end with that log in at these addresses with these settings, all at the same time."""

    async def attempt(address: str, section: dict[str, Any]) -> str:
        login = {"servers": [address], "user": "app", "password": "s3cret", **section}
        found = config(address, archive, nats=login, source={"create": False})
        try:
            await asyncio.wait_for(Capture(found).run(asyncio.Event(), until_caught_up=True), 60)
        except JetcaptureError as error:
            return str(error)
        return "nothing"

    async def attempt_all() -> list[str]:
        return await asyncio.gather(*(attempt(*each) for each in attempts))

    return asyncio.run(attempt_all())


def test_a_nats_server_that_cannot_show_who_it_is_is_sent_no_login(
    nats_server: Start, certificates: Path, tmp_path: Path
) -> None:
    cases, attempts = [], []
    for fault, reason in FAULTS.items():
        for first in (False, True):
            server = nats_server(secured(certificates, fault, ", handshake_first: true" if first else ""))
            tls = {"ca": str(certificates / "ca.pem"), "handshake_first": first}
            for scheme in ("nats", "tls"):
                cases.append((server, reason))
                attempts.append((server.url.replace("nats", scheme), {"tls": tls}))
    for (server, reason), refusal in zip(cases, refusals(tmp_path / "archive", attempts), strict=True):
        assert re.match(f"NATS refused the connection: .*{reason}", refusal), refusal
        assert "[CONNECT" not in server.log
    assert not (tmp_path / "archive").exists()


def test_the_same_server_with_a_good_certificate_is_and_without_a_ca_the_systems_authorities_count(
    nats_server: Start, certificates: Path, tmp_path: Path
) -> None:
    server = nats_server(secured(certificates, "good"))
    sections: list[dict[str, Any]] = [{}, {"tls": {}}]
    attempts = [(server.url.replace("nats", scheme), part) for scheme in ("nats", "tls") for part in sections]
    for refusal in refusals(tmp_path / "archive", attempts):
        assert "certificate verify failed" in refusal
    assert "[CONNECT" not in server.log
    (refusal,) = refusals(tmp_path / "archive", [(server.url, {"tls": {"ca": str(certificates / "ca.pem")}})])
    assert refusal.startswith("stream ORDERS does not exist")
    assert "[CONNECT" in server.log


@pytest.fixture
def endpoint(certificates: Path) -> Iterator[tuple[str, list[str]]]:
    """An HTTPS server whose authority nobody knows, and the requests that it has received."""
    requests: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def handle_one_request(self) -> None:
            if self.rfile.readline():
                requests.append("something")
            self.close_connection = True

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """A client that ends the handshake."""

    server = Server(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "unknown authority.pem", certificates / "unknown authority-key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"https://127.0.0.1:{server.server_port}", requests
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_object_store_that_cannot_show_who_it_is_is_sent_nothing(endpoint: tuple[str, list[str]]) -> None:
    address, requests = endpoint
    retries = {"config_kwargs": {"retries": {"max_attempts": 0}}}
    azure = {"connection_string": f"AccountName=a;AccountKey=YQ==;BlobEndpoint={address}/a;"}
    for url, options in (
        ("s3://bucket/x", {"key": "a", "secret": "b", "endpoint_url": address, **retries}),
        ("az://box/x", azure),
    ):
        for driver in ("fsspec", "obstore"):
            with pytest.raises(StoreError, match=r"(?i)certificate verify failed"):
                open_store(url, options_for(driver, options)).probe()
    assert requests == []
