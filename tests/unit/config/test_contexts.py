"""A context of the NATS CLI gives the same connection as the CLI makes of it, and never shows a secret."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from jetcapture_py.config.model import NatsConfig, loads
from jetcapture_py.errors import ConfigError

SECRET = "hunter2hunter2"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / ".config" / "nats" / "context").mkdir(parents=True)
    return tmp_path


def write(home: Path, name: str = "production", **fields: Any) -> Path:
    path = home / ".config" / "nats" / "context" / f"{name}.json"
    path.write_text(json.dumps({"description": "", "url": "nats://nats.example.com:4222", **fields}))
    return path


def nats(home: Path, context: str = "production", **env: str) -> NatsConfig:
    text = f'nats: {{context: "{context}"}}\nsource: {{stream: A, consumer: b}}\nstore: {{url: /archive}}'
    return loads(text, {"HOME": str(home), **env}).nats


def refusal(home: Path, context: str = "production", **env: str) -> str:
    with pytest.raises(ConfigError) as raised:
        nats(home, context, **env)
    assert SECRET not in str(raised.value)
    assert len(raised.value.problems) == 1
    return raised.value.problems[0]


def test_a_context_is_found_by_name_by_path_by_variable_and_by_selection(home: Path) -> None:
    path = write(home, "production", url="nats://one:4222")
    write(home, "staging", url="nats://two:4222")
    (home / ".config" / "nats" / "context.txt").write_text("staging\n")
    assert nats(home).servers == ("nats://one:4222",)
    assert nats(home, str(path)).servers == ("nats://one:4222",)
    assert nats(home, "~/.config/nats/context/production.json").servers == ("nats://one:4222",)
    assert nats(home, "").servers == ("nats://two:4222",)
    assert nats(home, "", NATS_CONTEXT="production").servers == ("nats://one:4222",)
    assert nats(home, "", NATS_CONTEXT=str(path)).servers == ("nats://one:4222",)
    elsewhere = home / "xdg"
    (elsewhere / "nats" / "context").mkdir(parents=True)
    write(home).rename(elsewhere / "nats" / "context" / "production.json")
    assert nats(home, XDG_CONFIG_HOME=str(elsewhere)).servers == ("nats://nats.example.com:4222",)


def test_neither_the_variable_nor_the_selection_replaces_explicit_servers(home: Path) -> None:
    write(home, "staging", url="nats://two:4222")
    (home / ".config" / "nats" / "context.txt").write_text("staging")
    text = "nats: {servers: ['nats://mine:4222']}\nsource: {stream: A, consumer: b}\nstore: {url: /archive}"
    env = {"HOME": str(home), "NATS_CONTEXT": "staging"}
    assert loads(text, env).nats.servers == ("nats://mine:4222",)
    without = "source: {stream: A, consumer: b}\nstore: {url: /archive}"
    assert loads(without, env).nats.servers == ("nats://127.0.0.1:4222",)
    with pytest.raises(ConfigError, match=r"^nats\.servers: cannot be combined with context, which replaces it$"):
        loads(text.replace("nats: {", "nats: {context: staging, "), env)


def test_every_field_that_concerns_a_connection_is_taken(home: Path) -> None:
    tls = {"ca": "~/ca.pem", "cert": "$HOME/client.pem", "key": "file:///etc/client-key.pem", "tls_first": True}
    ignored = {"color_scheme": "green", "jetstream_event_prefix": "ignored"}
    names = {"inbox_prefix": "_INBOX_app", "jetstream_domain": "hub", "jetstream_api_prefix": "JS.other.API"}
    write(home, url="tls://a:4222, b:4223", user="app", password=SECRET, **tls, **names, **ignored)
    found = nats(home)
    assert (found.servers, found.user) == (("tls://a:4222", "nats://b:4223"), "app")
    assert found.password is not None
    assert found.password.get_secret_value() == SECRET
    assert found.tls is not None
    assert (found.tls.ca, found.tls.cert) == (home / "ca.pem", home / "client.pem")
    assert (found.tls.key, found.tls.handshake_first) == (Path("/etc/client-key.pem"), True)
    assert (found.inbox_prefix, found.js_api) == ("_INBOX_app", "$JS.hub.API")
    assert SECRET not in repr(found)
    write(home, jetstream_api_prefix="JS.other.API")
    assert nats(home).js_api == "JS.other.API", "unless there is a domain"


def test_every_way_to_log_in_is_understood(home: Path) -> None:
    encoded = f"data:;base64,{base64.b64encode(SECRET.encode()).decode()}"
    for fields, setting, value in (
        ({"token": SECRET}, "token", SECRET),
        ({"url": f"nats://{SECRET}@a:4222"}, "token", SECRET),
        ({"url": "nats://app:p%40ss@a:4222"}, "password", "p@ss"),
        ({"url": "nats://old@a:4222", "token": SECRET}, "token", SECRET),
        ({"token": "env://NATS_SECRET"}, "token", SECRET),
        ({"user": "app", "password": encoded}, "password", SECRET),
        ({"user_jwt": "ey.j.w", "user_seed": SECRET}, "user_seed", SECRET),
        ({"user_jwt": SECRET}, "user_jwt", SECRET),
        ({"nkey": encoded}, "nkey_seed", SECRET),
    ):
        write(home, **fields)
        assert getattr(nats(home, NATS_SECRET=SECRET), setting).get_secret_value() == value, setting
    write(home, creds="~/app.creds")
    assert nats(home).creds == home / "app.creds", "a file is read when connecting"
    write(home, nkey="$HOME/app.nk")
    assert nats(home).nkey_seed_file == home / "app.nk"
    text = "-----BEGIN NATS USER JWT-----\ney.j.w\n------END NATS USER JWT------\n\n"
    text += f"-----BEGIN USER NKEY SEED-----\n{SECRET}\n------END USER NKEY SEED------\n"
    write(home, creds=f"data:;base64,{base64.b64encode(text.encode()).decode()}")
    found = nats(home)
    assert found.user_jwt is not None
    assert found.user_seed is not None
    assert (found.user_jwt.get_secret_value(), found.user_seed.get_secret_value()) == ("ey.j.w", SECRET)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"socks_proxy": f"socks5://{SECRET}"}, "the context sets socks_proxy: SOCKS proxies are not supported"),
    ({"nsc": "nsc://a/b/c"}, "nsc generate creds"),
    ({"windows_cert_store": "user"}, "certificates are read from files only"),
    ({"creds": f"op://vault/{SECRET}"}, "the context's creds is a reference op://, which is not supported; use a file"),
    ({"creds": f"data:;base64,{SECRET}"}, "the context's creds is not base64 after data:"),
    ({"creds": "data:;base64,eA=="}, "the context's creds do not contain a user's JWT and seed"),
    ({"token": "env://MISSING"}, 'the context\'s token needs the environment variable "MISSING", which is not set'),
    ({"user": [SECRET]}, "the context's user is not text"),
    ({"user": "app"}, "nats.password: "),
    ({"url": f"http://app:{SECRET}@a"}, "nats.servers[0]: expected an address"),
]


def test_a_context_that_is_not_supported_or_cannot_be_read_is_refused_in_one_line(home: Path) -> None:
    for fields, problem in REFUSED:
        write(home, **fields)
        assert problem in refusal(home)
    write(home, "staging")
    write(home).unlink()
    assert refusal(home, "prod") == 'nats.context: there is no context "prod"; known contexts: staging'
    assert refusal(home, "${X}", X=SECRET) == 'nats.context: there is no context "${X}"; known contexts: staging'
    assert refusal(home, "").startswith("nats.context: no context is selected: set NATS_CONTEXT, or run `nats context")
    assert "neither the name of a context" in refusal(home, "../staging")
    for text in (f"{{ {SECRET}", f'["{SECRET}"]'):
        write(home).write_text(text)
        assert refusal(home) == 'nats.context: "production" is not a NATS CLI context: its file is not a JSON object'
