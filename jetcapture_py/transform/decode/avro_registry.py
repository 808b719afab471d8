"""Look up writers' schemas in a directory of `<id>.avsc` files, or in a schema registry with Confluent's HTTP API."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jetcapture_py.backoff import delays
from jetcapture_py.text import one_line

_TIMEOUT = 5.0
_PATIENCE = 20.0
"""Seconds to retry an unresponsive registry before messages go to the quarantine."""
_FORGET = 30.0
"""Seconds after which a missing schema is looked up again."""
_MAX_MISSING = 10_000
_LARGEST = 16 << 20
"""Maximum bytes of a registry's answer."""


class RegistryError(Exception):
    """The setting is wrong: the registry cannot be used."""


class _SilentError(Exception):
    """The registry does not answer."""


class Registry:
    """Looks up schemas at `place`. Raises RegistryError for a directory that does not exist."""

    def __init__(self, place: str) -> None:
        self._url = place.rstrip("/") if "://" in place else None
        self._directory = Path(place)
        self._missing: dict[int | bytes, tuple[float, str]] = {}
        self._marks: dict[bytes, Path] = {}
        self._scanned, self._scan_again = 0, 0.0
        self._silent_until = 0.0
        if self._url is None and not self._directory.is_dir():
            raise RegistryError("the directory does not exist")

    def with_id(self, number: int) -> Any:
        """Return the parsed JSON of the schema with that id. Raises ValueError if it is not available."""
        self._check_missing(number)
        try:
            return self._fetch(number) if self._url is not None else _read(self._directory / f"{number}.avsc")
        except _SilentError as error:
            self._silent_until = time.monotonic() + _FORGET
            raise ValueError(f"the registry does not answer: {one_line(str(error))}") from None
        except FileNotFoundError:
            raise self.missed(number, f"schema {number} is not in the registry") from None
        except (OSError, ValueError, http.client.HTTPException, RecursionError) as error:
            raise self.missed(number, f"schema {number} cannot be read: {one_line(error)}") from None

    def with_fingerprint(self, mark: bytes, fingerprint: Callable[[Any], bytes]) -> Any | None:
        """Return the directory's schema with that `fingerprint`; None without one. Raises ValueError."""
        if self._url is not None:
            return None
        self._check_missing(mark)
        if mark not in self._marks:
            self._scan(fingerprint)
        if (path := self._marks.get(mark)) is None:
            return None
        try:
            return _read(path)
        except (OSError, ValueError, RecursionError) as error:
            raise self.missed(mark, f"the schema in {path.name} cannot be read: {one_line(error)}") from None

    def _scan(self, fingerprint: Callable[[Any], bytes]) -> None:
        """Read the directory again, if it changed since the last time, or after some time."""
        try:
            changed = self._directory.stat().st_mtime_ns
        except OSError:
            return
        if changed == self._scanned and time.monotonic() < self._scan_again:
            return
        for path in self._directory.glob("*.avsc"):
            try:
                self._marks[fingerprint(_read(path))] = path
            except (OSError, ValueError, RecursionError):
                continue  # messages with its id will say what is wrong with it
        self._scanned, self._scan_again = changed, time.monotonic() + _FORGET

    def _check_missing(self, key: int | bytes) -> None:
        if self._silent_until > time.monotonic():
            raise ValueError("the registry does not answer")
        again, reason = self._missing.get(key, (0.0, ""))
        if again > time.monotonic():
            raise ValueError(reason)

    def missed(self, key: int | bytes, reason: str) -> ValueError:
        """Return the error that a schema cannot be had or used, and give it again for some time without looking."""
        if len(self._missing) >= _MAX_MISSING:
            self._missing.clear()
        self._missing[key] = time.monotonic() + _FORGET, reason
        return ValueError(reason)

    def _fetch(self, number: int) -> Any:
        """Request a schema from the registry; retry for a while if it does not answer."""
        deadline, waits = time.monotonic() + _PATIENCE, delays(0.1, 2.0)
        while True:
            try:
                with urllib.request.urlopen(f"{self._url}/schemas/ids/{number}", timeout=_TIMEOUT) as answer:  # noqa: S310
                    found = json.loads(answer.read(_LARGEST))
                if not isinstance(found, dict) or found.get("schemaType", "AVRO") != "AVRO" or found.get("references"):
                    raise ValueError("it is not an Avro schema without references")
                return json.loads(found["schema"])
            except urllib.error.HTTPError as error:
                error.close()
                if error.code == 404:
                    raise FileNotFoundError from None
                if error.code < 500:
                    raise
                reason: Exception = error
            except (OSError, http.client.HTTPException) as error:
                reason = error
            if time.monotonic() > deadline:
                raise _SilentError(str(reason)) from None
            time.sleep(next(waits))


def _read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))
