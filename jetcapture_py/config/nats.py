"""The `nats` section: servers and credentials, its own or those of a context of the NATS CLI.

Contexts are `<name>.json` in `$XDG_CONFIG_HOME/nats/context`, or in `~/.config/nats/context` without that variable;
`context.txt` beside that directory names the selected one. The fields are those of
github.com/nats-io/jsm.go/natscontext. Errors never show a file's values, because most of them are secrets.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote

from pydantic import ValidationInfo, model_validator

from jetcapture_py.config import values as types
from jetcapture_py.config.section import Section, setting, wrong
from jetcapture_py.config.units import quoted

SELECTED = "NATS_CONTEXT"
"""The environment variable that names the context if the configuration's `context` is empty."""

_DEFAULT_SERVER = "nats://127.0.0.1:4222"
_SEED = re.compile(r"BEGIN USER NKEY SEED-+\s+(\S+)")
_JWT = re.compile(r"BEGIN NATS USER JWT-+\s+(\S+)")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_UNSUPPORTED = {
    "socks_proxy": "SOCKS proxies are not supported",
    "nsc": "run `nsc generate creds`, and put the file's path into creds",
    "windows_cert_store": "certificates are read from files only",
}


def read_context(name: str, env: Mapping[str, str]) -> dict[str, Any]:
    """Return a context as settings of the `nats` section. Raises ValueError with one line.

    `name` is a context's name, or the path of a file that ends in .json; "" means the context that NATS_CONTEXT names,
    or else the selected one.
    """
    parent = env.get("XDG_CONFIG_HOME")
    root = (Path(parent) if parent else _home(env) / ".config") / "nats"
    chosen = name or env.get(SELECTED, "") or _selected(root)
    path = Path(_expanded(chosen, env)) if chosen.endswith(".json") else root / "context" / f"{chosen}.json"
    if not chosen.endswith(".json") and (".." in chosen or "/" in chosen or "\\" in chosen):
        raise ValueError(f"{quoted(chosen)} is neither the name of a context nor the path of a file that ends in .json")
    return _Fields(_content(path, chosen, root), env).settings()


def _home(env: Mapping[str, str]) -> Path:
    return Path(env["HOME"]) if env.get("HOME") else Path.home()


def _selected(root: Path) -> str:
    try:
        name = (root / "context.txt").read_text().strip()
    except (OSError, UnicodeDecodeError):
        name = ""
    if not name:
        raise ValueError(f"no context is selected: set {SELECTED}, or run `nats context select NAME`")
    return name


def _content(path: Path, name: str, root: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        names = sorted(file.stem for file in (root / "context").glob("*.json"))
        hint = f"; known contexts: {', '.join(names[:10])}" if names and not name.endswith(".json") else ""
        raise ValueError(f"there is no context {quoted(name)}{hint}") from error
    except OSError as error:
        raise ValueError(f"context {quoted(name)} cannot be read: {error.strerror}") from error
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{quoted(name)} is not a NATS CLI context: its file is not a JSON object")
    return content


def _expanded(path: str, env: Mapping[str, str]) -> str:
    """Return the path with variables and a leading ~ replaced, as the NATS CLI does."""
    path = _VARIABLE.sub(lambda match: env.get(match[1] or match[2], ""), path)
    return path.replace("~", str(_home(env)), 1) if path.startswith("~") else path


def without_login(address: str) -> tuple[str, dict[str, str]]:
    """Split a server's address into the address without credentials, and the credentials in it."""
    scheme, separator, rest = address.rpartition("://")
    who, _, host = rest.rpartition("@")
    user, colon, password = who.partition(":")
    login = {"user": unquote(user), "password": unquote(password)} if colon else {"token": unquote(user)}
    return f"{scheme}{separator}{host}", login if who else {}


class _Fields:
    """The fields of one context's file."""

    def __init__(self, content: Mapping[str, Any], env: Mapping[str, str]) -> None:
        self._content, self._env = content, env

    def _text(self, field: str) -> str:
        value = self._content.get(field) or ""
        if not isinstance(value, str):
            raise ValueError(f"the context's {field} is not text")
        return value

    def settings(self) -> dict[str, Any]:
        for field, reason in _UNSUPPORTED.items():
            if self._text(field):
                raise ValueError(f"the context sets {field}: {reason}")
        pairs = [without_login(address.strip()) for address in (self._text("url") or _DEFAULT_SERVER).split(",")]
        servers = [address if "://" in address else f"nats://{address}" for address, _ in pairs]
        login = next((value for _, value in reversed(pairs) if value), {})
        settings: dict[str, Any] = {"servers": servers, **(self._login() or login)}
        if tls := self._tls():
            settings["tls"] = tls
        if domain := self._text("jetstream_domain"):  # the NATS CLI prefers it as well
            settings["domain"] = domain
        elif prefix := self._text("jetstream_api_prefix"):
            settings["api_prefix"] = prefix.removesuffix(".")
        if inbox := self._text("inbox_prefix"):
            settings["inbox_prefix"] = inbox
        return settings

    def _login(self) -> dict[str, str]:
        """Return the first way to log in, in the order of the NATS CLI."""
        if user := self._text("user"):
            return {"user": user, "password": self._secret("password")}
        if creds := self._text("creds"):
            return self._file_or_text("creds", creds)
        if nkey := self._text("nkey"):
            return self._file_or_text("nkey", nkey)
        if self._text("user_jwt"):
            seed = self._secret("user_seed")
            return {"user_jwt": self._secret("user_jwt"), **({"user_seed": seed} if seed else {})}
        token = self._secret("token")
        return {"token": token} if token else {}

    def _file_or_text(self, field: str, reference: str) -> dict[str, str]:
        """Return the path of a credentials file, or the credentials if the context contains them."""
        path = self._path(reference)
        if path is not None:
            return {"creds" if field == "creds" else "nkey_seed_file": path}
        text = self._resolved(field, reference)
        seed, jwt = _SEED.search(text), _JWT.search(text)
        if field == "nkey":
            return {"nkey_seed": seed[1] if seed else text.strip()}
        if seed is None or jwt is None:
            raise ValueError("the context's creds do not contain a user's JWT and seed")
        return {"user_jwt": jwt[1], "user_seed": seed[1]}

    def _path(self, reference: str) -> str | None:
        """Return the path that a reference names; None if it is another kind of reference."""
        if reference.lower().startswith("file:"):
            return _expanded(reference[5:].removeprefix("//"), self._env)
        return None if re.match(r"[a-zA-Z][\w+.-]+:", reference) else _expanded(reference, self._env)

    def _secret(self, field: str) -> str:
        return self._resolved(field, self._text(field)).rstrip("\r\n")

    def _resolved(self, field: str, reference: str) -> str:
        """Resolve a reference to an environment variable, a file or base64 data; return other text unchanged."""
        scheme, _, rest = reference.partition(":")
        scheme = scheme.lower()
        if scheme == "env" and rest.startswith("//"):
            if not self._env.get(rest[2:]):
                raise ValueError(
                    f"the context's {field} needs the environment variable {quoted(rest[2:])}, which is not set"
                )
            return self._env[rest[2:]]
        if scheme == "data":
            head, comma, data = rest.partition(",")
            if not comma or not head.lower().endswith(";base64"):
                raise ValueError(f"the context's {field} is not base64 after data:")
            try:
                return base64.b64decode(data, validate=True).decode()
            except (binascii.Error, UnicodeDecodeError):
                raise ValueError(f"the context's {field} is not base64 after data:") from None
        if scheme == "file" and rest.startswith("//"):
            try:
                return Path(_expanded(rest[2:], self._env)).read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"the file of the context's {field} cannot be read") from error
        if scheme in ("op", "nsc") and rest.startswith("//"):
            raise ValueError(f"the context's {field} is a reference {scheme}://, which is not supported; use a file")
        return reference

    def _tls(self) -> dict[str, Any]:
        tls: dict[str, Any] = {}
        for field in ("ca", "cert", "key"):
            if reference := self._text(field):
                path = self._path(reference)
                if path is None:
                    raise ValueError(f"the context's {field} is not the path of a file")
                tls[field] = path
        if self._content.get("tls_first"):
            tls["handshake_first"] = True
        return tls


class TlsConfig(Section):
    """How the connection to NATS is encrypted."""

    ca: types.FilePath | None = setting("PEM file with the certificate authorities to trust instead of the system's.")
    cert: types.FilePath | None = setting("PEM file with the client certificate; needs `key`.")
    key: types.FilePath | None = setting("PEM file with the client's private key; needs `cert`.")
    handshake_first: bool = setting("Start the TLS handshake before the server sends its INFO line.", default=False)

    @model_validator(mode="after")
    def _pair(self) -> Self:
        if (self.cert is None) != (self.key is None):
            missing, given = ("key", "cert") if self.key is None else ("cert", "key")
            raise wrong(missing, f"required with {given}, but not set")
        return self


class NatsConfig(Section):
    """The NATS servers, and how to log in to them: with at most one of user and password, token, creds, nkey_seed,
    user_jwt.

    With `context`, all other settings come from the NATS CLI's file, which is read together with the configuration.
    """

    servers: types.Servers = setting(
        "Addresses of one cluster: nats://, tls://, ws:// or wss://.", default=("nats://127.0.0.1:4222",)
    )
    context: types.Context | None = setting(
        "A NATS CLI context, by name or by the path of its .json file, instead of all other settings of "
        "this section. Empty text: the one that NATS_CONTEXT names, else the selected one."
    )
    user: str | None = setting("User name; needs `password` or `password_file`.", min_length=1)
    password: types.Secret | None = setting("Password of `user`.")
    password_file: types.FilePath | None = setting("File that holds the password.")
    token: types.Secret | None = setting("Token to log in with.")
    token_file: types.FilePath | None = setting("File that holds the token.")
    creds: types.FilePath | None = setting("Credentials file with a user's JWT and seed.")
    nkey_seed: types.Secret | None = setting("NKey seed to log in with (the seed itself).")
    nkey_seed_file: types.FilePath | None = setting("File that holds the NKey seed.")
    user_jwt: types.Secret | None = setting("A user's JWT; with `user_seed`, unless it is a bearer token.")
    user_seed: types.Secret | None = setting("NKey seed of the user of `user_jwt`.")
    tls: TlsConfig | None = setting(
        "TLS settings. With this section, even an empty one, unencrypted connections are refused."
    )
    domain: types.Subject | None = setting("JetStream domain.")
    api_prefix: types.Subject | None = setting(
        "Prefix of the JetStream API instead of `$JS.API`, for streams imported from another account."
    )
    inbox_prefix: types.Subject = setting("Prefix of the subjects that replies are received on.", default="_INBOX")

    @property
    def has_websockets(self) -> bool:
        """Whether its servers are WebSocket addresses."""
        return any(url.lower().startswith("ws") for url in self.servers)

    @property
    def js_api(self) -> str:
        """The prefix of the JetStream API's subjects, without the dot at its end."""
        return self.api_prefix or (f"$JS.{self.domain}.API" if self.domain else "$JS.API")

    @model_validator(mode="before")
    @classmethod
    def _from_context(cls, data: object, info: ValidationInfo) -> object:
        if not isinstance(data, dict) or data.get("context") is None:
            return data
        name = data["context"]
        others = [setting for setting in cls.model_fields if setting != "context" and data.get(setting) is not None]
        if others:
            raise wrong(others[0], "cannot be combined with context, which replaces it")
        if not isinstance(name, str):
            return data  # refused like any other setting
        env = (info.context or {}).get("env", os.environ)
        try:
            return {**data, **read_context(name, env)}
        except ValueError as error:
            raise wrong("context", str(error)) from None

    @model_validator(mode="after")
    def _one_login(self) -> Self:
        if self.domain is not None and self.api_prefix is not None:
            raise wrong("api_prefix", "cannot be combined with domain")
        if self.user_seed is not None and self.user_jwt is None:
            raise wrong("user_jwt", "required with user_seed, but not set")
        for name in ("password", "token", "nkey_seed"):
            if getattr(self, name) is not None and getattr(self, f"{name}_file") is not None:
                raise wrong(f"{name}_file", f"cannot be combined with {name}")
        has_password = self.password is not None or self.password_file is not None
        if self.user is not None and not has_password:
            raise wrong("password", "required with user, but not set (or set password_file)")
        if has_password and self.user is None:
            raise wrong("user", "required with a password, but not set")
        ways = {
            "user": self.user,
            "token": self.token or self.token_file,
            "creds": self.creds,
            "nkey_seed": self.nkey_seed or self.nkey_seed_file,
            "user_jwt": self.user_jwt,
        }
        used = [name for name, value in ways.items() if value is not None]
        if len(used) > 1:
            raise wrong(used[1], f"cannot be combined with {used[0]}; choose one way to log in")
        return self
