"""Reads `config/google_cloud.yaml`."""

import os
from pathlib import Path

from llm_assets.cloud.settings import GoogleCloudSettings
from llm_assets.config import read_settings_file

CLOUD_CONFIG_VARIABLE = "LLM_ASSETS_GOOGLE_CLOUD"
DEFAULT_CLOUD_CONFIG = "config/google_cloud.yaml"


def cloud_config_path() -> Path:
    """The cloud project's file in force: `LLM_ASSETS_GOOGLE_CLOUD`, else the default one."""
    return Path(os.environ.get(CLOUD_CONFIG_VARIABLE, DEFAULT_CLOUD_CONFIG))


def load_cloud_settings(path: Path | None = None) -> GoogleCloudSettings:
    """Read and check the cloud project's file; raises UserError listing every fault."""
    return read_settings_file(
        path or cloud_config_path(), GoogleCloudSettings, CLOUD_CONFIG_VARIABLE
    )
