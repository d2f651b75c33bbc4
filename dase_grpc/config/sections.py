"""What the sections of the configuration share: frozen, no unknown keys, numbers as people write them."""

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from dase_grpc.config.texts import INTEGER_LIMIT


class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants")

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_boolean(cls, value: Any, info: ValidationInfo) -> Any:
        """Where a number or a text is wanted, pydantic would read true and false as 1 and 0."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise PydanticCustomError("boolean", "must not be true or false")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _reads_whole_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """A text for a whole number may be written as 1e5 or 100_000, as a number in TOML may."""
        if isinstance(value, str) and cls.model_fields[str(info.field_name)].annotation is int:
            value = whole_number(value)
        if isinstance(value, int) and not -INTEGER_LIMIT <= value < INTEGER_LIMIT:
            raise PydanticCustomError("too_large", "is too large")
        return value


def whole_number(text: str) -> int | str:
    """The number that a text such as "100000", "100_000" or "1e5" is; the text where it is none."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        return text
    return int(value) if value.is_integer() and abs(value) < 2**53 else text
