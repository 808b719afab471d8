"""Build HTML in which every text is escaped, because keys, subjects and errors come from messages."""

from __future__ import annotations

from html import escape

from jetcapture_py.monitoring.words import visible

_LONGEST = 4000
_VOID = {"meta", "link", "rect", "path", "line"}


class Html(str):
    """Markup. Any other text is escaped where it becomes part of a page."""

    __slots__ = ()


Content = str | None
"""`Html`, text to escape, or nothing."""


def tag(name: str, /, *children: Content, **attributes: str | float | None) -> Html:
    """Return an element. `class_` is the attribute `class`, `aria_label` is `aria-label`; None leaves one out."""
    given = "".join(
        f' {_attribute(key)}="{escape(visible(str(value), _LONGEST))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID and not children:
        return Html(f"<{name}{given}>" if name in ("meta", "link") else f"<{name}{given}/>")
    return Html(f"<{name}{given}>{join(*children)}</{name}>")


def join(*children: Content) -> Html:
    """Return children one after the other."""
    return Html(
        "".join(child if isinstance(child, Html) else escape(visible(child, _LONGEST)) for child in children if child)
    )


def _attribute(name: str) -> str:
    return name.removesuffix("_").replace("_", "-")
