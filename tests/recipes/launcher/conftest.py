"""The local Google, whose Vertex AI starts the launcher as the cuda image does."""

from tests.stand_ins.fixtures import google, started_google  # noqa: F401
