"""Keeps NATS JetStream streams as Parquet, and acknowledges only what is stored.

Everything in `__all__` is the public interface. It is imported when it is first used, so that `import jetcapture_py`
costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jetcapture_py.archive import layout as layout
    from jetcapture_py.archive.block_writer import BlockWriter as BlockWriter
    from jetcapture_py.archive.writer import EncodedBlock as EncodedBlock
    from jetcapture_py.capture.announcing import OnStored as OnStored
    from jetcapture_py.capture.announcing import StoredObject as StoredObject
    from jetcapture_py.capture.pipeline import Capture as Capture
    from jetcapture_py.config.model import Config as Config
    from jetcapture_py.config.model import load as load
    from jetcapture_py.errors import ConfigError as ConfigError
    from jetcapture_py.errors import DrainError as DrainError
    from jetcapture_py.errors import JetcaptureError as JetcaptureError
    from jetcapture_py.errors import PermanentStoreError as PermanentStoreError
    from jetcapture_py.errors import SourceError as SourceError
    from jetcapture_py.errors import StoreError as StoreError
    from jetcapture_py.files import ArchivedFile as ArchivedFile
    from jetcapture_py.files import list_files as list_files
    from jetcapture_py.files import read_file as read_file
    from jetcapture_py.files import save_file as save_file
    from jetcapture_py.reading.arrow import read_archive as read_archive
    from jetcapture_py.reading.bucket import read_bucket as read_bucket
    from jetcapture_py.reading.latest import read_latest as read_latest
    from jetcapture_py.store import Store as Store
    from jetcapture_py.transform.batch import BatchTooWideError as BatchTooWideError
    from jetcapture_py.transform.batch import Decoded as Decoded
    from jetcapture_py.transform.batch import Decoder as Decoder
    from jetcapture_py.transform.batch import Failure as Failure
    from jetcapture_py.transform.batch import MessageBatch as MessageBatch
    from jetcapture_py.transform.keys import KeyFunction as KeyFunction

_MODULES = {
    "ArchivedFile": "files",
    "BatchTooWideError": "transform.batch",
    "BlockWriter": "archive.block_writer",
    "Capture": "capture.pipeline",
    "Config": "config.model",
    "ConfigError": "errors",
    "Decoded": "transform.batch",
    "Decoder": "transform.batch",
    "DrainError": "errors",
    "EncodedBlock": "archive.writer",
    "Failure": "transform.batch",
    "JetcaptureError": "errors",
    "KeyFunction": "transform.keys",
    "MessageBatch": "transform.batch",
    "OnStored": "capture.announcing",
    "PermanentStoreError": "errors",
    "SourceError": "errors",
    "Store": "store",
    "StoreError": "errors",
    "StoredObject": "capture.announcing",
    "layout": "archive",
    "list_files": "files",
    "load": "config.model",
    "read_archive": "reading.arrow",
    "read_bucket": "reading.bucket",
    "read_file": "files",
    "read_latest": "reading.latest",
    "save_file": "files",
}

__all__ = [*_MODULES]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    value = importlib.import_module(f"{__name__}.archive.layout") if name == "layout" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
