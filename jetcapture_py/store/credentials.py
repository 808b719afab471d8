"""Read secrets from files, and reopen a driver with new credentials once the store has rejected the old ones."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from jetcapture_py.errors import ConfigError
from jetcapture_py.store.ports import Entry, RemoteDriver, is_denied, is_unknown_header

SECRETS = (
    *("key", "secret", "token", "account_key", "sas_token", "connection_string", "client_secret"),
    *("access_key_id", "secret_access_key", "session_token", "sas_key", "service_account_key"),
)
"""Options that may be given as a file, `NAME_file`, which is re-read when the store rejects its content."""
RENEW = 5.0
"""Minimum seconds between reads of the credentials."""
T = TypeVar("T")


def with_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` with the content of secret files in place of their names. Raises `ConfigError`."""
    resolved = dict(options)
    for name in SECRETS:
        if (path := resolved.pop(f"{name}_file", None)) is not None:
            if name in resolved:
                raise ConfigError(f"store.options: {name} or {name}_file, not both")
            try:
                resolved[name] = Path(path).read_text().strip()
            except (OSError, UnicodeDecodeError, TypeError) as error:
                raise ConfigError(f"store.options: cannot read {name}_file; {type(error).__name__}: {path}") from error
    return resolved


class RenewedDriver:
    """A driver that retries a request once with new credentials after the old ones were rejected."""

    def __init__(self, opened: Callable[[Mapping[str, Any]], RemoteDriver], options: Mapping[str, Any]) -> None:
        self._open, self._options = opened, options
        self._resolved = with_secrets(options)
        self._opening, self._opened = threading.Lock(), time.monotonic()
        self.driver = opened(self._resolved)

    @property
    def root(self) -> str:
        return self.driver.root

    @property
    def conditional(self) -> bool:
        return self.driver.conditional

    def list(self, directory: str, *, deep: bool = True) -> Sequence[Entry]:
        return self.attempt(lambda driver: tuple(driver.list(directory, deep=deep)))

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        if end is not None and end <= start:  # stores answer such a range with an error or the whole file
            return b""
        return self.attempt(lambda driver: driver.read(path, start, end))

    def stat(self, path: str) -> Entry:
        return self.attempt(lambda driver: driver.stat(path))

    def write(self, path: str, data: pa.Buffer, condition: str | None) -> None:
        self.attempt(lambda driver: driver.write(path, data, condition))

    def remove(self, path: str, condition: str | None = None) -> None:
        self.attempt(lambda driver: driver.remove(path, condition))

    def locked(self, name: str) -> AbstractContextManager[None]:
        return self.driver.locked(name)

    def attempt(self, work: Callable[[RemoteDriver], T]) -> T:
        """Return the result of `work` on the driver; retry once with new credentials after rejected ones."""
        driver = self.driver
        try:
            return work(driver)
        except Exception as error:
            if is_unknown_header(error) or not is_denied(error) or not self._renew(driver):
                raise
        return work(self.driver)

    def _renew(self, refused: RemoteDriver) -> bool:
        """Read the credentials again, at most every `RENEW` seconds; return whether the driver `refused` has been
        replaced."""
        with self._opening:
            if self.driver is refused and time.monotonic() - self._opened >= RENEW:
                self._opened = time.monotonic()
                # a file may be incomplete or missing for a moment
                with contextlib.suppress(Exception):
                    resolved = with_secrets(self._options)
                    # Azure's library refreshes credentials that it finds itself, and leaks replaced clients
                    if refused.kind != "azure" or resolved != self._resolved:
                        self.driver, self._resolved = self._open(resolved), resolved
            return self.driver is not refused
