"""What the last step of each image writes, for a small environment of this machine."""

import json
import shutil
import sys
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("dpkg-query") is None, reason="the images are Debian's")
def test_bill_names_python_and_debian_packages_and_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "images")
    from bill_of_materials import describe
    from cyclonedx.validation.json import JsonStrictValidator  # takes each test worker 1.6 s

    venv.create(tmp_path / "image", symlinks=True)
    (packages,) = (tmp_path / "image" / "lib").glob("python*/site-packages")
    metadata = distribution("click")
    shutil.copytree(
        metadata.locate_file(f"click-{metadata.version}.dist-info"), packages / "c.dist-info"
    )
    bill = describe(sys.executable, str(tmp_path / "image" / "bin" / "python"))
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bill)) is None
    kinds = {purl.split("/")[0]: purl for purl in (c["purl"] for c in bill["components"])}
    assert set(kinds) == {"pkg:pypi", "pkg:deb"}
    assert kinds["pkg:pypi"] == f"pkg:pypi/click@{metadata.version}"
    names = [component["name"] for component in bill["components"]]
    assert {"libc6", "dpkg"} <= set(names) and "cyclonedx-bom" not in names
