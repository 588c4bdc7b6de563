"""Writes what an image is made of, as its last step: CycloneDX 1.6 of its packages.

    python3 images/bill_of_materials.py OUTPUT --constraints requirements.lock

The Python packages come from cyclonedx-bom, installed aside so that it is not among them; those of
the Linux distribution from dpkg.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

DPKG = "${db:Status-Status} ${Package} ${Version} ${Architecture}\\n"


def main() -> None:
    """Install the program aside, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--constraints", required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        program = f"{folder}/bin/python"
        install = ["uv", "pip", "install", "--quiet", "--no-cache", "--python", program]
        subprocess.run([*install, "cyclonedx-bom", "-c", options.constraints], check=True)
        bill = describe(program, sys.executable)
    options.output.write_text(json.dumps(bill, indent=2))
    print(f"{options.output}: {len(bill['components'])} packages")


def describe(program: str, python: str) -> dict[str, Any]:
    """The bill of materials of this machine.

    Args:
        program: a Python that has cyclonedx-bom.
        python: the one whose packages are listed.
    """
    command = [program, "-m", "cyclonedx_py", "environment", python, "--output-format", "JSON"]
    command += ["--spec-version", "1.6", "--output-reproducible"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    bill: dict[str, Any] = json.loads(done.stdout)
    bill["components"] = [*bill.get("components", []), *debian_packages()]
    return bill


def debian_packages() -> list[dict[str, str]]:
    """The installed packages of Debian or Ubuntu, by the names of https://github.com/package-url."""
    command = ["dpkg-query", "--show", f"--showformat={DPKG}"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    lines = Path("/etc/os-release").read_text().splitlines()
    released = dict(line.split("=", 1) for line in lines if "=" in line)
    distribution = released["ID"].strip('"')
    components = []
    for line in done.stdout.splitlines():
        status, name, version, architecture = line.split(" ")
        if status != "installed":
            continue
        purl = f"pkg:deb/{distribution}/{name}@{quote(version)}?arch={architecture}"
        component = {"type": "library", "bom-ref": purl, "name": name}
        components.append(component | {"version": version, "purl": purl})
    return components


if __name__ == "__main__":
    main()
