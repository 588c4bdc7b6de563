"""A project whose platform is the local Google Cloud."""

from tests.stand_ins.fixtures import google, started_google  # noqa: F401
