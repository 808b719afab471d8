"""Read contexts of the NATS CLI: files with the servers' addresses and credentials.

They are `<name>.json` in `$XDG_CONFIG_HOME/nats/context`, or in `~/.config/nats/context` without that variable;
`context.txt` beside that directory names the selected one. The fields are those of
github.com/nats-io/jsm.go/natscontext. Errors never show a file's values, because most of them are secrets.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

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
    root = _root(env)
    chosen = name or env.get(SELECTED, "") or _selected(root)
    path = Path(_expanded(chosen, env)) if chosen.endswith(".json") else _named(root, chosen)
    return _Fields(_content(path, chosen, root), env).settings()


def _root(env: Mapping[str, str]) -> Path:
    parent = env.get("XDG_CONFIG_HOME")
    return (Path(parent) if parent else _home(env) / ".config") / "nats"


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


def _named(root: Path, name: str) -> Path:
    if ".." in name or "/" in name or "\\" in name:
        raise ValueError(
            f"expected the name of a context, or the path of a file that ends in .json, got {quoted(name)}"
        )
    return root / "context" / f"{name}.json"


def _content(path: Path, name: str, root: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        known = sorted(each.stem for each in (root / "context").glob("*.json"))
        hint = f"; known contexts: {', '.join(known[:10])}" if known and not name.endswith(".json") else ""
        raise ValueError(f"there is no context {quoted(name)}{hint}") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a NATS CLI context: expected a JSON object")
    return found


def _expanded(path: str, env: Mapping[str, str]) -> str:
    """Return the path with variables and a leading ~ replaced, as the NATS CLI does."""
    path = _VARIABLE.sub(lambda match: env.get(match[1] or match[2], ""), path)
    return path.replace("~", str(_home(env)), 1) if path.startswith("~") else path


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
        servers, login = self._servers()
        found: dict[str, Any] = {"servers": servers, **(self._login() or login)}
        if tls := self._tls():
            found["tls"] = tls
        if domain := self._text("jetstream_domain"):  # the NATS CLI prefers it as well
            found["domain"] = domain
        elif prefix := self._text("jetstream_api_prefix"):
            found["api_prefix"] = prefix.removesuffix(".")
        if inbox := self._text("inbox_prefix"):
            found["inbox_prefix"] = inbox
        return found

    def _servers(self) -> tuple[list[str], dict[str, str]]:
        """Return the addresses without credentials, and the credentials that were in them."""
        servers, login = [], {}
        for address in (self._text("url") or _DEFAULT_SERVER).split(","):
            scheme, separator, rest = address.strip().rpartition("://")
            who, _, host = rest.rpartition("@")
            user, colon, password = who.partition(":")
            if who:
                login = {"user": unquote(user), "password": unquote(password)} if colon else {"token": unquote(user)}
            servers.append(f"{scheme or 'nats'}://{host}" if separator else f"nats://{host}")
        return servers, login

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
        """Return credentials as the path of their file, or as they are if the context contains them."""
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
        found: dict[str, Any] = {}
        for field in ("ca", "cert", "key"):
            if reference := self._text(field):
                path = self._path(reference)
                if path is None:
                    raise ValueError(f"the context's {field} is not the path of a file")
                found[field] = path
        if self._content.get("tls_first"):
            found["handshake_first"] = True
        return found
