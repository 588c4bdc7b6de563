"""What every command says of itself."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from artifacts.errors import UserError
from llm_assets.cli.main import commands

PACKAGES = ("artifacts", "llm_assets", "recipes", "serving", "spark_jobs")
SOURCES = [path for package in PACKAGES for path in sorted(Path(package).rglob("*.py"))]
COMMAND = re.compile(
    r"`(llm-assets [a-z][^`]*)`|: (llm-assets [a-z][^`&;]*?)(?: &&|;|\. |\.?$)", re.MULTILINE
)


def commands_in(path: Path) -> Iterator[tuple[str, str]]:
    """Where messages of a module name commands, and the commands, a word for each value in them."""
    content = path.read_text()
    if "llm-assets " not in content:
        return
    nodes = list(ast.walk(ast.parse(content)))
    docstrings = [node.value for node in nodes if isinstance(node, ast.Expr)]
    parts = [part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values]
    passed_over = {*map(id, docstrings), *map(id, parts)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            text = "".join(
                part.value if isinstance(part, ast.Constant) else "X" for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if id(node) not in passed_over:
            for quoted, last in COMMAND.findall(text):
                yield f"{path}:{node.lineno}", quoted or last


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
    with pytest.raises(UserError, match=r"no page 'setting'; did you mean `settings`\?"):
        CliRunner().invoke(commands, ["docs", "setting"], catch_exceptions=False)


def test_every_command_that_a_message_names_can_be_typed() -> None:
    """With a word for each argument that it cannot do without, and no unknown option."""
    named = [(place, line) for path in SOURCES for place, line in commands_in(path)]
    assert len(named) > 50
    for place, line in named:
        name, *arguments = shlex.split(line)[1:]
        assert name in commands.commands, f"{place}: {line}"
        try:
            commands.commands[name].make_context(name, arguments)
        except (click.MissingParameter, click.NoSuchOption) as fault:
            pytest.fail(f"{place}: `{line}`: {fault.format_message()}")
        except click.UsageError:
            pass  # The word for a file or a number is neither.
