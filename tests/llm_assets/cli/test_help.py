"""What every command says of itself."""

import re

import pytest
from click.testing import CliRunner

from artifacts.errors import UserError
from llm_assets.cli.main import commands


@pytest.mark.parametrize("name", sorted(commands.commands))
def test_help_has_an_example_that_the_command_understands(name: str) -> None:
    told = CliRunner().invoke(commands, [name, "--help"], catch_exceptions=False).output
    _, _, examples = told.partition("Example")
    (command, *_) = [line.strip() for line in examples.splitlines() if "llm-assets" in line]
    _, _, arguments = command.partition(f" {name}")
    known = {option for one in commands.commands[name].params for option in one.opts}
    given = {word for word in arguments.split() if word.startswith("--")}
    assert f" {name}" in command and given <= known


def test_the_list_of_commands_says_in_whole_what_each_is_for() -> None:
    told = CliRunner().invoke(commands, ["--help"], catch_exceptions=False).output
    _, _, listed = told.partition("Commands:")
    assert len(listed.strip().splitlines()) == len(commands.commands)
    assert "..." not in listed


def test_docs_shows_the_pages_and_names_them_where_there_is_none() -> None:
    told = CliRunner().invoke(commands, ["docs"], catch_exceptions=False).output
    assert re.search(r"^settings +Settings$", told, re.MULTILINE)
    page = CliRunner().invoke(commands, ["docs", "settings"], catch_exceptions=False).output
    assert page.startswith("# Settings") and "`checkpoint.budget.steps`" in page
    with pytest.raises(UserError, match=r"no page 'setting'. The pages are: .*settings"):
        CliRunner().invoke(commands, ["docs", "setting"], catch_exceptions=False)
