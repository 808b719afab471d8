"""The base class of the configuration's sections, and the description of their problems, one line each.

A line has the setting's path, what was expected, and what the file says there, with variables as they are written.
Validators only say what was expected; those of secrets raise `hidden`. A section that is text is named by its kind,
because it may be an address with a password.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from jetcapture_py.config import yaml_text
from jetcapture_py.config.units import dotted, got, kind, quoted
from jetcapture_py.errors import ConfigError
from jetcapture_py.text import escaped

Model = TypeVar("Model", bound=BaseModel)

_CLOSE = 0.75
_NOTHING = object()
_REASONS = {
    "missing": "required, but not set",
    "string_too_short": "expected non-empty text",
    "too_short": "expected at least one item",
    "greater_than_equal": "expected at least {ge}",
    "less_than_equal": "expected at most {le}",
    "bool_parsing": "expected true or false",
    "bool_type": "expected true or false",
    "int_from_float": "expected a whole number",
    "int_parsing": "expected a whole number",
    "int_parsing_size": "expected a whole number in range",
    "int_type": "expected a whole number",
}


def setting(description: str, *, default: Any = None, **rules: Any) -> Any:
    """Define an optional setting. Its default is written as in the file, and appears like that in the schema."""
    return Field(default, validate_default=True, description=description, **rules)


class Section(BaseModel):
    """A section of settings; immutable."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)
    keeps_null: ClassVar[frozenset[str]] = frozenset()
    """Settings for which null differs from a missing setting."""

    @model_validator(mode="before")
    @classmethod
    def _left_out(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        optional = cls.model_fields.keys() - cls.keeps_null
        return {name: value for name, value in data.items() if value is not None or name not in optional}


def wrong(setting: str, reason: str) -> PydanticCustomError:
    """Return an error about one setting, for a section's validator to raise."""
    return PydanticCustomError("setting", "{setting}: {reason}", {"setting": setting, "reason": reason})


def hidden(reason: str) -> PydanticCustomError:
    """Return an error for the validator of a possible secret: nothing is added to the reason."""
    return PydanticCustomError("hidden", "{reason}", {"reason": reason})


def validated(
    model: type[Model],
    data: object,
    *,
    env: Mapping[str, str] | None = None,
    rename: Callable[[str], str] = str,
    text: str | None = None,
    section: str = "",
) -> Model:
    """Return plain values as `model`. Raises ConfigError with one line per problem, each passed through `rename`.

    `env` locates the contexts of the NATS CLI. `text` is the file's text before variables are replaced; messages quote
    it. The values are those of the file's `section`.
    """
    try:
        return model.model_validate(data, context=None if env is None else {"env": env})
    except ValidationError as error:
        details = [detail for detail in error.errors() if detail["type"] != "default_factory_not_called"]
    # Raised outside of the handler: the validation error holds the secrets, and would be this one's context.
    above = (section,) if section else ()
    written = data if text is None else _written(yaml_text.read(text, None), above)
    raise ConfigError(*(rename(_line(detail, model, written, above)) for detail in details))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean ack_wait?` if a known word is close, else ""."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=_CLOSE)
    return f"; did you mean {close[0]}?" if close else ""


def _line(detail: ErrorDetails, model: type[BaseModel], written: object, above: tuple[str, ...]) -> str:
    path: tuple[int | str, ...] = detail["loc"]
    context: Mapping[str, Any] = detail.get("ctx", {})
    if detail["type"] == "setting":
        path = (*path, *str(context["setting"]).split("."))
    if detail["type"] == "extra_forbidden":
        reason = "unknown setting" + _other_name(path, detail["input"], model)
    else:
        reason = _reason(detail, context, _written(written, path))
    where = dotted((*above, *path))
    return f"{where}: {reason}" if where else reason


def _written(data: object, path: Iterable[int | str]) -> object:
    """Return the file's text at `path`, or above it if one value stands for a list or a mapping; else `_NOTHING`."""
    for part in path:
        if isinstance(data, dict):
            data = data.get(part, _NOTHING)
        elif isinstance(data, list | tuple):
            data = data[part] if isinstance(part, int) and part < len(data) else _NOTHING
    return data


def _reason(detail: ErrorDetails, context: Mapping[str, Any], written: object) -> str:
    error, value = detail["type"], detail["input"]
    if error == "hidden":
        return str(context["reason"])
    if error in ("model_type", "model_attributes_type", "dict_type"):
        return f"expected a mapping of settings, got {kind(value)}"
    if error in ("tuple_type", "list_type"):
        return f"expected a list, got {kind(value)}"
    if error == "setting":
        reason, held = str(context["reason"]), _written(value, str(context["setting"]).split("."))
        if isinstance(held, str) and isinstance(written, str):
            reason = reason.replace(quoted(held), quoted(written))
    elif error == "value_error":
        reason = " ".join(str(context["error"]).split())
        if not reason.startswith("expected ") and isinstance(value, str) and value != written:
            reason = "expected another value"  # the reason may show that of a variable
    elif error == "literal_error":
        choices = re.findall(r"'([^']*)'", str(context["expected"]))
        reason = f"expected {either(choices)}{did_you_mean(value.lower(), choices) if isinstance(value, str) else ''}"
    elif error == "string_type":
        reason = f"expected text; put it in quotes{_braces(value)}"
    else:
        reason = _REASONS[error].format(**context) if error in _REASONS else escaped(detail["msg"])
    return reason if written is _NOTHING else got(reason, written)


def _other_name(path: Sequence[int | str], value: object, model: type[BaseModel]) -> str:
    """Suggest what an unknown setting may mean: a similar name beside it, or the same name elsewhere."""
    name = str(path[-1])
    section = _section(path[:-1], model)
    close = did_you_mean(name, _names(section)) if section else ""
    if close or isinstance(value, dict):
        return close
    sections = {head: _model_in(field.annotation) for head, field in model.model_fields.items()}
    homes = [head for head, section in sections.items() if section and name in _names(section)]
    return f"; did you mean {homes[0]}.{name}?" if len(homes) == 1 else ""


def _section(path: Iterable[int | str], model: type[BaseModel]) -> type[BaseModel] | None:
    """Return the model of the settings at `path`."""
    section: type[BaseModel] | None = model
    for part in path:
        if section is not None and part in section.model_fields:
            section = _model_in(section.model_fields[str(part)].annotation)
    return section


def _names(section: type[BaseModel]) -> Sequence[str]:
    """Return the names of a section's settings, as written in the file."""
    return [field.alias or name for name, field in section.model_fields.items()]


def _model_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := _model_in(part))), None)


def either(choices: Sequence[str]) -> str:
    """Return the choices as text: `a, b or c`."""
    return " or ".join([", ".join(choices[:-1]), choices[-1]]) if len(choices) > 1 else "".join(choices)


def _braces(value: object) -> str:
    """Explain that unquoted `{subject}` is a mapping in YAML."""
    if isinstance(value, dict) and len(value) == 1 and next(iter(value.values())) is None:
        return f': "{{{escaped(str(next(iter(value))))}}}"'
    return ""
