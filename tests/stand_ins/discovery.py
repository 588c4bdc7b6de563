"""Google's own descriptions of its REST APIs, which come with the package google-api-python-client.

A method is named as its description has it, after the API's: `compute.regions.get`.
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any

STANDARD = {"alt", "fields", "key", "prettyPrint", "quotaUser", "uploadType", "upload_id"}
"""Parameters of every method."""


@cache
def document(name: str) -> dict[str, Any]:
    """The description of an API and version: `compute.v1`."""
    folder = files("googleapiclient.discovery_cache.documents")
    content: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return content


@cache
def methods(name: str) -> dict[str, dict[str, Any]]:
    """The methods of an API by their names."""
    return {method["id"]: method for method in _methods(document(name))}


def _methods(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for resource in content.get("resources", {}).values():
        yield from resource.get("methods", {}).values()
        yield from _methods(resource)


def text(name: str, path: str) -> str:
    """What an API's description says of a method, of its parameter, or of a schema's property."""
    parent, _, last = path.rpartition(".")
    if schema := document(name)["schemas"].get(parent):
        return str(schema["properties"][last]["description"])
    api = name.partition(".")[0]
    if method := methods(name).get(f"{api}.{path}"):
        return str(method["description"])
    return str(methods(name)[f"{api}.{parent}"]["parameters"][last]["description"])


@cache
def pattern(name: str, method: str) -> re.Pattern[str]:
    """What the paths of a method look like."""
    described = methods(name)[method]
    parts = re.split(r"\{(\+?\w+)\}", document(name)["servicePath"] + described["path"])
    for place in range(1, len(parts), 2):
        parameter = described["parameters"][parts[place].removeprefix("+")]
        allowed = parameter.get("pattern", "[^/]+").removeprefix("^").removesuffix("$")
        parts[place] = f"({allowed})"
    fixed = [re.escape(part) if n % 2 == 0 else part for n, part in enumerate(parts)]
    return re.compile("/" + "".join(fixed))


UPLOADS = re.compile(r"/(resumable/)?(upload|download)(?=/)")
"""What goes before the paths of content."""


def method_of(name: str, verb: str, path: str) -> str | None:
    """The method that a request to an API is; None for none of its own paths."""
    location = UPLOADS.sub("", path.partition("?")[0], count=1)
    for method, described in methods(name).items():
        if described["httpMethod"] == verb and pattern(name, method).fullmatch(location):
            return method
    return None


def unknown_names(name: str, method: str, query: Any, body: Any) -> list[str]:
    """Parameters and fields of a request that a method does not have."""
    described = methods(name)[method]
    unknown = [key for key in query if key not in STANDARD | set(described["parameters"])]
    schema = described.get("request", {}).get("$ref")
    return unknown + list(_unknown_fields(document(name)["schemas"], schema, body))


def _unknown_fields(schemas: dict[str, Any], schema: str | None, body: Any) -> Iterator[str]:
    if not isinstance(body, dict):
        return
    known = schemas[schema]["properties"] if schema else {}
    for key, value in body.items():
        if key not in known:
            yield f"{schema}.{key}"
        elif inner := known[key].get("$ref"):
            yield from _unknown_fields(schemas, inner, value)
