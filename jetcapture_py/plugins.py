"""Load user objects named in the configuration as `package.module:object`."""

from __future__ import annotations

import importlib
import re

from jetcapture_py.text import one_line

_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


def is_reference(text: str) -> bool:
    """Whether `text` names an object in a module."""
    return _REFERENCE.fullmatch(text) is not None


def load(reference: str) -> object:
    """Return the object. Raises ValueError with one line when it cannot be imported, whatever its module does."""
    module, _, attribute = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:
        raise ValueError(f"cannot import {reference}: {one_line(error)}") from error
