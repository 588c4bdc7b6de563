"""What a sensor remembers from one tick to the next."""

from typing import TypeVar

from pydantic import BaseModel, ValidationError

Remembered = TypeVar("Remembered", bound=BaseModel)


def read_cursor(model: type[Remembered], content: str | None) -> Remembered | None:
    """A cursor that was written as this model; None for none, or one of another version."""
    try:
        return model.model_validate_json(content or "")
    except ValidationError:
        return None
