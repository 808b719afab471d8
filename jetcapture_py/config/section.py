"""The base class of the configuration's sections."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator


def human(text: str, description: str) -> Any:
    """Define a setting whose default is written as in the file, and appears like that in the schema."""
    return Field(text, validate_default=True, description=description)


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
