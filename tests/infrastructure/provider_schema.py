"""What Google's Terraform provider takes, for the resources of infrastructure/.

    python -m tests.infrastructure.provider_schema WHEEL...

reads it from the wheels of cdktf-cdktf-provider-google and -google-beta (PyPI), which are generated
from the provider's own schema, and writes provider_schema.json: for each block the attributes that
are required, and all others.
"""

import ast
import json
import re
import sys
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

from tests.infrastructure import terraform

PATH = Path(__file__).with_suffix(".json")
OF_TERRAFORM = {
    *("connection", "count", "depends_on", "for_each", "lifecycle", "provider", "provisioners"),
    *("timeouts", "id"),
}
"""What every resource has; `id` is the generator's own."""
INIT = "__init__.py"
Block = dict[str, list[str]]


def used_blocks(kind: str, content: Any, path: str) -> dict[str, set[str]]:
    """Each block of a resource, by its path, and the attributes that are set in it."""
    blocks: dict[str, set[str]] = {path: set()}
    for name, value in content.items():
        if name.startswith("__") or name in OF_TERRAFORM:
            continue
        if name == "dynamic":
            for inner in value if isinstance(value, list) else [value]:
                for block, body in inner.items():
                    if not block.startswith("__"):
                        blocks[path].add(block)
                        body = body[0] if isinstance(body, list) else body
                        inside = body["content"]
                        inside = inside[0] if isinstance(inside, list) else inside
                        _merge(blocks, used_blocks(kind, inside, f"{path}.{block}"))
            continue
        blocks[path].add(name)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict) and "__is_block__" in item:
                _merge(blocks, used_blocks(kind, item, f"{path}.{name}"))
    return blocks


def all_used() -> dict[str, set[str]]:
    """The same for all resources of infrastructure/."""
    blocks: dict[str, set[str]] = {}
    for block in terraform.read("resource"):
        for kind, named in block.items():
            for content in named.values():
                if isinstance(content, dict):
                    _merge(blocks, used_blocks(kind, content, kind))
    return blocks


def _merge(blocks: dict[str, set[str]], more: dict[str, set[str]]) -> None:
    for path, names in more.items():
        blocks.setdefault(path, set()).update(names)


@cache
def _read(wheels: tuple[str, ...], kind: str) -> dict[str, ast.ClassDef]:
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                # The beta provider's modules keep the prefix.
                if name.split("/")[1:] in ([kind.removeprefix("google_"), INIT], [kind, INIT]):
                    tree = ast.parse(archive.read(name))
                    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    raise SystemExit(f"no wheel has {kind}")


def _block(classes: dict[str, ast.ClassDef], name: str) -> tuple[Block, dict[str, str]]:
    """The attributes of a block, and the class of each that is a block itself."""
    functions = (node for node in classes[name].body if isinstance(node, ast.FunctionDef))
    arguments = next(node for node in functions if node.name == "__init__").args
    block: Block = {"required": [], "optional": []}
    inner: dict[str, str] = {}
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if argument.arg in OF_TERRAFORM:
            continue
        block["required" if default is None else "optional"].append(argument.arg)
        written = ast.unparse(argument.annotation) if argument.annotation else ""
        for quoted in re.findall(r"\w+", written):
            if quoted in classes:
                inner[argument.arg] = quoted
    return block, inner


def main(wheels: list[str]) -> None:
    schema: dict[str, Block] = {}
    for path in sorted(all_used()):
        kind, *inside = path.split(".")
        classes = _read(tuple(wheels), kind)
        long = "".join(map(str.title, kind.split("_"))) + "Config"
        short = long.removeprefix("Google")
        block, inner = _block(classes, short if short in classes else long)
        for step in inside:
            block, inner = _block(classes, inner[step])
        schema[path] = block
    lines = [f"{json.dumps(path)}: {json.dumps(block)}" for path, block in schema.items()]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
