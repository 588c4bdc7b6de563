"""From what Terraform made to the cloud project's file."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from artifacts.errors import UserError
from llm_assets.cli.main import commands
from llm_assets.cloud.settings import CLOUD_CONFIG_VARIABLE, load_cloud_settings
from llm_assets.cloud.setup.terraform import read_outputs, write_settings

MADE = {
    "settings": {
        "project": "text-team-1",
        "region": "europe-west4",
        "bucket": "text-team-1-llm-assets",
        "service_account": "llm-assets@text-team-1.iam.gserviceaccount.com",
        "builder_account": "llm-assets-builder@text-team-1.iam.gserviceaccount.com",
        "subnetwork": "projects/text-team-1/regions/europe-west4/subnetworks/llm-assets",
        "tensorboard": "projects/1/locations/europe-west4/tensorboards/2",
    },
    "repository": "europe-west4-docker.pkg.dev/text-team-1/llm-assets",
    "secret": "hugging-face-token",
}


def write_outputs(folder: Path, values: dict[str, Any], encoding: str = "utf-8") -> Path:
    path = folder / "outputs.json"
    text = json.dumps({name: {"value": value} for name, value in values.items()})
    path.write_text(text, encoding)
    return path


def test_file_is_brought_to_what_was_made_and_keeps_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "google_cloud.yaml"
    shipped = Path("config/google_cloud.yaml").read_text()
    path.write_text(shipped.replace("\nimages:\n", "\nimages:\n  tpu: null\n"))
    machines = load_cloud_settings(path).training
    write_settings(read_outputs(write_outputs(tmp_path, MADE)), path)
    settings = load_cloud_settings(path)
    assert settings.region == "europe-west4" and settings.training == machines
    assert settings.images.cuda == f"{MADE['repository']}/cuda:latest"
    assert settings.images.tpu is None
    assert settings.secrets.hugging_face_token == "hugging-face-token"
    assert settings.tensorboard == "projects/1/locations/europe-west4/tensorboards/2"


def test_comments_and_the_form_of_the_other_values_stay(tmp_path: Path) -> None:
    path = tmp_path / "google_cloud.yaml"
    text = """\
# Ours since spring; ask Ada before you change it.
project: text-team-0  # the old one
region: europe-west4
bucket: text-team-1-llm-assets
service_account: llm-assets@text-team-1.iam.gserviceaccount.com

images:
  # Spark's is pinned: the cluster lags behind.
  spark: us-east1-docker.pkg.dev/text-team-0/llm-assets/spark:1.2
  cuda: us-east1-docker.pkg.dev/text-team-0/llm-assets/cuda:latest
  serve: example.com/ours/server:3

cost: {run_limit: 100, monthly_limit: 500}  # dollars
web_access: yes
"""
    path.write_text(text)
    write_settings(read_outputs(write_outputs(tmp_path, MADE)), path)
    written = path.read_text()
    changed = text.replace("us-east1-docker.pkg.dev/text-team-0/llm-assets", MADE["repository"])
    changed = changed.replace("text-team-0", "text-team-1")
    lines = changed.removesuffix("web_access: yes\n").splitlines()
    assert written.splitlines()[: len(lines)] == lines
    assert load_cloud_settings(path).web_access
    assert load_cloud_settings(path).images.spark == f"{MADE['repository']}/spark:1.2"

    write_settings(read_outputs(write_outputs(tmp_path, MADE)), path)
    assert path.read_text() == written


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_command_writes_a_file_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """From outputs of any shell: PowerShell writes the other two."""
    path = tmp_path / "config" / "google_cloud.yaml"
    monkeypatch.setenv(CLOUD_CONFIG_VARIABLE, str(path))
    arguments = ["setup", "--outputs", str(write_outputs(tmp_path, MADE, encoding))]
    done = CliRunner().invoke(commands, arguments, catch_exceptions=False)
    assert done.exit_code == 0 and "text-team-1" in done.output
    assert path.read_text().startswith("# The cloud project")
    assert yaml.safe_load(path.read_text())["secrets"] == {}
    assert load_cloud_settings(path).images.spark.endswith("/spark:latest")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", "settings, repository, secret"),
        ("not JSON", "terraform -chdir=infrastructure apply"),
        ('{"settings": {"value": {}}, "repository": {"value": "a"}}', "lacks secret"),
        ("[]", "terraform output -json"),
    ],
)
def test_other_files_are_refused_with_what_is_wanted(
    tmp_path: Path, text: str, expected: str
) -> None:
    path = tmp_path / "outputs.json"
    path.write_text(text)
    with pytest.raises(UserError, match=expected):
        read_outputs(path)


@pytest.mark.parametrize(
    "text",
    [
        *("web_acess: true\n", "images: a/cuda:1\n", "images: {cuda: 1}\n", "secrets: a-token\n"),
        *(f"cost: {{prices: {{n1-standard-8: {price}}}}}\n" for price in (-1, 1e9)),
    ],
)
def test_result_that_would_not_be_valid_leaves_the_file_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "google_cloud.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=text.partition(":")[0]):
        write_settings(read_outputs(write_outputs(tmp_path, MADE)), path)
    assert path.read_text() == text


def test_a_section_that_is_there_twice_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "google_cloud.yaml"
    text = "images: {cuda: a/cuda:1}\nimages: {spark: a/spark:1}\n"
    path.write_text(text)
    with pytest.raises(UserError, match="the key `images` is on line 1 and again on line 2"):
        write_settings(read_outputs(write_outputs(tmp_path, MADE)), path)
    assert path.read_text() == text
