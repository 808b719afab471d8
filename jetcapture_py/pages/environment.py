"""The template environment of all pages: everything is escaped, and unprintable characters are made visible."""

from __future__ import annotations

from functools import cache

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from jetcapture_py.pages import words

MAX_TEXT = 4000
"""Maximum characters of one printed value."""


@cache
def environment(package: str) -> Environment:
    """Return the environment for the templates of `package`; it also works from a zip file.

    Templates extend `base.html` and filter values with the functions of `words`.
    """
    templates = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader("jetcapture_py.pages")]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else words.visible(str(value), MAX_TEXT, keep="\n"),
    )
    for name in ("age", "clipped", "day", "duration", "moment", "plural", "share", "size", "visible"):
        templates.filters[name] = getattr(words, name)
    templates.filters["count"] = lambda number: f"{number:,}"
    return templates
