"""What the smallest batch and the smallest jobs of `llm-assets check --smoke` are given."""

from pydantic import BaseModel, ConfigDict

PROBE = b"written by llm-assets check --smoke\n"
UPLOADED = "uploaded/probe"
"""What lies in the output before the job: an object in a folder that nobody has made."""

CHECK_VARIABLE = "CHECK_SPEC"
"""Names the spec to the serve image, which then parses its engine's arguments, and serves not."""


class SmokeSpec(BaseModel):
    """Where they try to write; a new place for each check, so that none is taken for done."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    output: str
