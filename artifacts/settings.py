"""The base of every settings model."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Frozen, refuses unknown keys; the docstring under a field is its description in the docs."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
