"""The README's two commands on a bare Debian, by an ordinary user."""

import re
from pathlib import Path

import pytest

from tests.bare_machine import bare_machine
from tests.needs import AVX2, needs

pytestmark = [
    pytest.mark.soak,
    pytest.mark.usefixtures("package_registries"),
    needs("debootstrap", "the right to mount a disk in memory"),
]
MEGABYTES = 2_500
"""Most that the environment of `make run` may take."""


def test_the_main_command_holds_on_a_bare_machine(tmp_path: Path) -> None:
    with bare_machine(tmp_path, **AVX2) as machine:
        ran = machine.run("make run")
        assert ran.code == 0 and "promoted" in ran.output
        again = machine.run("make run")
        assert again.code == 0
        megabytes = int(machine.run("du --summarize --block-size=1M .venv").output.split()[0])
        print(f"run {ran.seconds:.0f} s, again {again.seconds:.1f} s, .venv {megabytes} MB")
        assert megabytes <= MEGABYTES
        assert machine.run("make stop").code == 0


def test_the_tests_pass_on_a_bare_machine(tmp_path: Path) -> None:
    with bare_machine(tmp_path, **AVX2) as machine:
        assert machine.run("make setup").code == 0
        tested = machine.run("make test")
        print(f"test {tested.seconds:.0f} s")
        assert tested.code == 0, tested.output[-2000:]


def test_the_main_command_holds_where_names_and_settings_are_odd(tmp_path: Path) -> None:
    """A folder with a space, no home, no language, a clock east of Greenwich."""
    odd = {"LANG": "C", "TZ": "Pacific/Auckland", "HOME": ""}
    with bare_machine(tmp_path, "/home/user/my checkout", **AVX2, **odd) as machine:
        ran = machine.run("make run")
        assert ran.code == 0 and "promoted" in ran.output
        assert not re.search(r"^Traceback", ran.output, re.MULTILINE)
        machine.run("make stop")
