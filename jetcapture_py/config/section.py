"""The base class of the configuration's sections, and the description of their problems, one line each.

A line has the setting's path, what was expected, and what was found. A value is shown only for types of errors that are
known to concern plain settings. Validators of secrets write their own messages, and a section that is text is named by
its kind, because it may be an address with a password.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from jetcapture_py.config.units import Expanded, dotted, kind, quoted
from jetcapture_py.errors import ConfigError
from jetcapture_py.text import escaped

Model = TypeVar("Model", bound=BaseModel)

_CLOSE = 0.75
_SAME_MEANING = {
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
    """An error for a section's validator to raise about one of the section's settings."""
    return PydanticCustomError("setting", "{setting}: {reason}", {"setting": setting, "reason": reason})


def validated(
    model: type[Model], data: object, *, env: Mapping[str, str] | None = None, rename: Callable[[str], str] = str
) -> Model:
    """Return plain values as `model`. Raises ConfigError with one line per problem, each passed through `rename`.

    `env` says where the contexts of the NATS CLI are.
    """
    try:
        return model.model_validate(data, context=None if env is None else {"env": env})
    except ValidationError as error:
        details = [detail for detail in error.errors() if detail["type"] != "default_factory_not_called"]
    # Raised outside of the handler: the validation error holds the secrets, and would be this one's context.
    raise ConfigError(*(rename(_line(detail, model)) for detail in details))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean ack_wait?` when a known word is close, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=_CLOSE)
    return f"; did you mean {close[0]}?" if close else ""


def _line(detail: ErrorDetails, model: type[BaseModel]) -> str:
    path: tuple[int | str, ...] = detail["loc"]
    context: Mapping[str, Any] = detail.get("ctx", {})
    if detail["type"] == "setting":
        path, reason = (*path, *str(context["setting"]).split(".")), str(context["reason"])
    elif detail["type"] == "extra_forbidden":
        reason = "unknown setting" + _other_name(path, detail["input"], model)
    else:
        reason = _reason(detail["type"], detail["msg"], detail["input"], context)
    where = dotted(path)
    return f"{where}: {reason}" if where else reason


def _reason(error: str, message: str, value: object, context: Mapping[str, Any]) -> str:
    if error == "value_error":
        return _as_written(" ".join(str(context["error"]).split()), value)
    if error == "missing":
        return "required, but not set"
    if error == "literal_error":
        choices = re.findall(r"'([^']*)'", str(context["expected"]))
        guess = did_you_mean(value.lower(), choices) if isinstance(value, str) else ""
        return f"expected {either(choices)}, got {quoted(value)}{guess}"
    if error == "string_type":
        return f"expected text, got {quoted(value)}; put it in quotes{_braces(value)}"
    if error in _SAME_MEANING:
        return f"{_SAME_MEANING[error]}, got {quoted(value)}"
    if error == "greater_than_equal":
        return f"expected at least {context['ge']}, got {quoted(value)}"
    if error == "less_than_equal":
        return f"expected at most {context['le']}, got {quoted(value)}"
    if error in ("model_type", "model_attributes_type", "dict_type"):
        return f"expected a mapping of settings, got {kind(value)}"
    if error in ("tuple_type", "list_type"):
        return f"expected a list, got {kind(value)}"
    return escaped(message)


def _as_written(reason: str, value: object) -> str:
    """The reason with what the file says in place of a variable's value: pydantic gives a plain text to validators."""
    if not isinstance(value, Expanded) or quoted(value) in reason:
        return reason
    shown = reason.replace(quoted(str(value)), quoted(value))
    return shown if shown != reason or not re.search("[\"']", reason) else f"cannot be used, got {quoted(value)}"


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
    """The model that describes the settings at `path`."""
    section: type[BaseModel] | None = model
    for part in path:
        if section is not None and part in section.model_fields:
            section = _model_in(section.model_fields[str(part)].annotation)
    return section


def _names(section: type[BaseModel]) -> Sequence[str]:
    """The names of a section's settings, as they are written."""
    return [field.alias or name for name, field in section.model_fields.items()]


def _model_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := _model_in(part))), None)


def either(choices: Sequence[str]) -> str:
    """The choices as text: `a, b or c`."""
    return " or ".join([", ".join(choices[:-1]), choices[-1]]) if len(choices) > 1 else "".join(choices)


def _braces(value: object) -> str:
    """Explain that unquoted `{subject}` is a mapping in YAML."""
    if isinstance(value, dict) and len(value) == 1 and next(iter(value.values())) is None:
        return f': "{{{escaped(str(next(iter(value))))}}}"'
    return ""
