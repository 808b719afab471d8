"""Parse key templates such as `{subject[1]}-{region}`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from jetcapture_py.text import is_text

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_PART = re.compile(
    r"(?P<subject>subject(?:\[(?P<token>\d{1,4})\])?)|header\.(?P<header>[!-9;-~]+)|(?P<field>[^\s{}\[\]]+)"
)


@dataclass(frozen=True, slots=True)
class TemplatePart:
    """One piece of a template: `kind` is text, subject, token, header or field; `value` is its text, index or name."""

    kind: str
    value: str | int = ""


STREAM = TemplatePart("field", "stream")
"""The part `{stream}` of a key: the stream's name, not a field of the message."""


def parse_template(text: str) -> tuple[TemplatePart, ...]:
    """Parse a key template such as `{subject[1]}`, `{header.X-Tenant}`, `{region}` or `a-{region}`.

    Raises ValueError with one line for an invalid template.
    """
    if not is_text(text):
        raise ValueError(f"{text!a} is not valid text: it contains a surrogate")
    parts: list[TemplatePart] = []
    position = 0
    for match in _PLACEHOLDER.finditer(text):
        parts += _text(text[position : match.start()], text)
        position = match.end()
        inner = _PART.fullmatch(match.group(1))
        if inner is None:
            raise ValueError(
                f"cannot read {match.group()!r}; use {{subject}}, {{subject[N]}}, {{header.NAME}} or a decoded field"
            )
        if inner["token"] is not None:
            parts.append(TemplatePart("token", int(inner["token"])))
        elif inner["subject"] is not None:
            parts.append(TemplatePart("subject"))
        elif inner["header"] is not None:
            parts.append(TemplatePart("header", inner["header"]))
        else:
            parts.append(TemplatePart("field", inner["field"]))
    return (*parts, *_text(text[position:], text))


def part_name(part: TemplatePart) -> str:
    """Return the text between the braces for `part`; "" for literal text."""
    if part.kind == "token":
        return f"subject[{part.value}]"
    return {"text": "", "subject": "subject", "header": f"header.{part.value}"}.get(part.kind, str(part.value))


def _text(piece: str, template: str) -> list[TemplatePart]:
    if "{" in piece or "}" in piece:
        raise ValueError(f"unbalanced braces in {template!r}")
    return [TemplatePart("text", piece)] if piece else []
