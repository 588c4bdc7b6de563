"""The compose file: its schema, what it mounts, and that nothing is reached from outside."""

import re
import subprocess
import sys

import yaml

from tests.conftest import ROOT

FOLDER = ROOT / "infrastructure" / "compose"
COMPOSE = FOLDER / "compose.yaml"
SERVICES = yaml.safe_load(COMPOSE.read_text())["services"]


def test_it_is_what_the_compose_specification_allows() -> None:
    checked = subprocess.run(
        [
            *(sys.executable, "-m", "check_jsonschema"),
            *("--builtin-schema", "vendor.compose-spec", str(COMPOSE)),
        ],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_what_it_mounts_and_builds_from_exists() -> None:
    build = SERVICES["graph"]["build"]
    assert (FOLDER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).exists()
    mounted = [volume.split(":")[0] for each in SERVICES.values() for volume in each["volumes"]]
    for path in (path for path in mounted if path.startswith(".")):
        assert (FOLDER / path).exists(), path


def test_nothing_listens_beyond_this_machine_and_no_secret_is_in_the_file() -> None:
    assert all("ports" not in each for each in SERVICES.values())
    assert "listen_addresses=127.0.0.1" in SERVICES["postgres"]["command"]
    assert "--web.listen-address=127.0.0.1:9090" in SERVICES["prometheus"]["command"]
    assert SERVICES["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert SERVICES["postgres"]["environment"]["POSTGRES_PASSWORD"].startswith("${")
    assert ":${POSTGRES_PASSWORD:?}@" in SERVICES["graph"]["environment"]["DAGSTER_POSTGRES_URL"]


def test_the_image_ends_without_root_and_is_built_from_the_code_alone() -> None:
    dockerfile = (FOLDER / "Dockerfile").read_text()
    assert re.findall(r"^USER (\S+)", dockerfile, re.MULTILINE)[-1] != "root"
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    for line in ignored:
        if line.startswith("!"):
            assert (ROOT / line[1:]).exists(), line
