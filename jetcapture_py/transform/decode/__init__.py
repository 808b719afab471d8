"""Decoders: payloads to columns, one file per format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, cast

from jetcapture_py import plugins
from jetcapture_py.archive.schema import conform, unify
from jetcapture_py.config.column_types import parse_type
from jetcapture_py.text import one_line
from jetcapture_py.transform.batch import Decoder
from jetcapture_py.transform.decode.json_declared import JsonColumn, JsonDecoder
from jetcapture_py.transform.decode.json_inferred import InferringJsonDecoder
from jetcapture_py.transform.decode.raw import RawDecoder

__all__ = [
    "FormatConfig",
    "InferringJsonDecoder",
    "JsonDecoder",
    "RawDecoder",
    "conform",
    "make_decoder",
    "parse_type",
    "unify",
]


class FormatConfig(Protocol):
    """The part of the configuration that says how payloads are decoded."""

    @property
    def format(self) -> str:
        """raw, json, or `package.module:object`: a `Decoder`, or a callable that returns one."""
        ...

    @property
    def columns(self) -> Mapping[str, JsonColumn]:
        """Declared columns by name; empty: inferred."""
        ...


def make_decoder(config: FormatConfig) -> Decoder:
    """Return the configured decoder. Raises ValueError with one line."""
    if config.format == "json":
        return JsonDecoder(config.columns) if config.columns else InferringJsonDecoder()
    if config.columns:
        raise ValueError(f"columns can be declared for format json only, not for {config.format!a}")
    if config.format == "raw":
        return RawDecoder()
    if not plugins.is_reference(config.format):
        raise ValueError(f"unknown format {config.format!a}: raw, json or package.module:object")
    found = plugins.load(config.format)
    made = found
    if callable(found) and (isinstance(found, type) or not hasattr(found, "decode")):
        try:
            made = found()
        except (Exception, SystemExit) as error:
            raise ValueError(f"{config.format} cannot be created: {one_line(error)}") from error
    if not callable(getattr(made, "decode", None)):
        raise ValueError(f"{config.format} is not a decoder: it has no method decode")
    return cast("Decoder", made)
