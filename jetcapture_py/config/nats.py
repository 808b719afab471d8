"""The `nats` section: servers and credentials."""

from __future__ import annotations

import os
from typing import Self

from pydantic import Field, ValidationInfo, model_validator

from jetcapture_py.config import values as types
from jetcapture_py.config.contexts import read_context
from jetcapture_py.config.messages import wrong
from jetcapture_py.config.section import Section


class TlsConfig(Section):
    """How the connection to NATS is encrypted."""

    ca: types.FilePath | None = Field(
        default=None, description="PEM file with the certificate authorities to trust instead of the system's."
    )
    cert: types.FilePath | None = Field(default=None, description="PEM file with the client certificate; needs `key`.")
    key: types.FilePath | None = Field(
        default=None, description="PEM file with the client's private key; needs `cert`."
    )
    handshake_first: bool = Field(
        default=False, description="Start the TLS handshake before the server sends its INFO line."
    )

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

    servers: types.Servers = Field(
        default=("nats://127.0.0.1:4222",), description="Addresses of one cluster: nats://, tls://, ws:// or wss://."
    )
    context: types.Context | None = Field(
        default=None,
        description="A NATS CLI context, by name or by the path of its .json file, instead of all other settings of "
        "this section. Empty text: the one that NATS_CONTEXT names, else the selected one.",
    )
    user: str | None = Field(default=None, min_length=1, description="User name; needs `password` or `password_file`.")
    password: types.Secret | None = Field(default=None, description="Password of `user`.")
    password_file: types.FilePath | None = Field(default=None, description="File that holds the password.")
    token: types.Secret | None = Field(default=None, description="Token to log in with.")
    token_file: types.FilePath | None = Field(default=None, description="File that holds the token.")
    creds: types.FilePath | None = Field(default=None, description="Credentials file with a user's JWT and seed.")
    nkey_seed: types.Secret | None = Field(default=None, description="NKey seed to log in with (the seed itself).")
    nkey_seed_file: types.FilePath | None = Field(default=None, description="File that holds the NKey seed.")
    user_jwt: types.Secret | None = Field(
        default=None, description="A user's JWT; with `user_seed`, unless it is a bearer token."
    )
    user_seed: types.Secret | None = Field(default=None, description="NKey seed of the user of `user_jwt`.")
    tls: TlsConfig | None = Field(
        default=None,
        description="TLS settings. With this section, even an empty one, unencrypted connections are refused.",
    )
    domain: types.Subject | None = Field(default=None, description="JetStream domain.")
    api_prefix: types.Subject | None = Field(
        default=None,
        description="Prefix of the JetStream API instead of `$JS.API`, for streams imported from another account.",
    )
    inbox_prefix: types.Subject = Field(
        default="_INBOX", description="Prefix of the subjects that replies are received on."
    )

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
            return data  # refused as any other setting
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
