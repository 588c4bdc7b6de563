"""What Google's services ask of each call that the product makes: rights, fields, rules.

`conformance.json` says it, method by method, and every call to the local Google is held against it:
the caller needs the rights, and sets no field that is not listed; of REST calls, none that Google's
description of the API does not have. Each rule says which stand-in keeps it, which test notices if
not (else test_conformance.py breaks it), and where it is written: in the installed proto or
description, with the text's hash, or on a page. A test notices a text that has changed; after
reading it,

    python -m tests.stand_ins.conformance [CALLS]

enters the new hashes and, from the file that RECORD_CALLS named while tests ran, the fields, and
writes the table of docs/google_cloud_reference.md.
"""

import hashlib
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from tests.stand_ins import discovery
from tests.stand_ins.faults import RpcFailed

PATH = Path(__file__).with_suffix(".json")
TABLE: dict[str, dict[str, Any]] = json.loads(PATH.read_text())
DOCUMENT = Path(__file__).parents[2] / "docs" / "google_cloud_reference.md"
BEGIN, END = "<!-- python -m tests.stand_ins.conformance -->\n", "<!-- end -->\n"
RECORD = "RECORD_CALLS"
PAGE = "page: "
LINE = 100
WELL_KNOWN = "google.protobuf."
"""Times, structures, masks: whole values, of which nothing is looked into."""
PROJECT = "projects/local-project"
Allows = Callable[[str, str, str], bool]
"""Whether an account has a permission on a resource."""


def set_fields(message: Message, prefix: str = "") -> Iterator[str]:
    """Paths of everything that is set, repeated fields without their numbers."""
    for field, value in message.ListFields():
        path = f"{prefix}{field.name}"
        kind = field.message_type
        if kind is None or kind.GetOptions().map_entry or kind.full_name.startswith(WELL_KNOWN):
            yield path
        else:
            for item in value if field.label == field.LABEL_REPEATED else [value]:
                yield from set_fields(item, f"{path}.")


def check_call(method: str, request: Any, caller: str, agent: str, allows: Allows) -> None:
    """Refuse a call that its caller has no right to, or that is not as the table has it.

    Args:
        caller: the account that calls.
        agent: the account that Vertex AI itself acts as.
    """
    if method not in TABLE:
        raise RpcFailed(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not in {PATH.name}")
    message = request if isinstance(request, Message) else type(request).pb(request)
    fields = set(set_fields(message))
    if file := os.environ.get(RECORD):
        with open(file, "a") as calls:
            calls.writelines(f"{method} {field}\n" for field in sorted(fields))
    elif unlisted := fields - set(TABLE[method]["fields"]):
        text = f"{method}: {sorted(unlisted)} are not in {PATH.name}: read what Google says of them"
        raise RpcFailed(grpc.StatusCode.UNIMPLEMENTED, text)
    check_rights(method, message, {"caller": caller, "vertex_ai": agent}, allows)


def check_rest_call(api: str, verb: str, path: str) -> str | None:
    """The method of an API that a request is; None for none of it, such as a part of an upload.

    Raises:
        RpcFailed: it is one that the table does not have.
    """
    method = discovery.method_of(api, verb, path)
    if method is not None and method not in TABLE:
        raise RpcFailed(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not in {PATH.name}")
    return method


def check_rights(method: str, request: Any, accounts: dict[str, str], allows: Allows) -> None:
    """Refuse a call for which an account has not the right that the table names."""
    for who, permission, place in TABLE[method]["rights"]:
        resource = _resource(request, place)
        if allows(accounts[who], permission, resource):
            continue
        text = f"Permission '{permission}' denied on '{resource}' (or it may not exist)."
        if permission == "iam.serviceAccounts.actAs":
            account = resource.rpartition("/")[2]
            text = f"You do not have permission to act as service_account: {account}"
        raise RpcFailed(grpc.StatusCode.PERMISSION_DENIED, text)


def _resource(message: Any, place: str) -> str:
    """The full name of what a right is asked on: the project, or what a field names."""
    if place == "project":
        return f"//cloudresourcemanager.googleapis.com/{PROJECT}"
    if place == "bucket":
        return f"//storage.googleapis.com/projects/_/buckets/{message or ''}"
    value = message
    for name in place.split("."):
        # Of several, which are alike; a request that says nothing names nobody.
        value = value[0] if isinstance(value, Sequence) and value else value
        value = getattr(value, name, "")
    if "/secrets/" in value:
        return f"//secretmanager.googleapis.com/{value.partition('/versions/')[0]}"
    return f"//iam.googleapis.com/{PROJECT}/serviceAccounts/{value}"


def described(written: str) -> str | None:
    """What the installed packages say at a place; None for a page.

    Args:
        written: such as `aiplatform_v1.CustomJobSpec.tensorboard` in a proto, or
            `compute.v1 regions.get.region` in an API's description.
    """
    if written.startswith(PAGE):
        return None
    if " " in written:
        return discovery.text(*written.split())
    module, name, field = written.split(".")
    kind = getattr(importlib.import_module(f"google.cloud.{module}"), name)
    text = inspect.getdoc(kind) or ""
    (said,) = re.findall(rf"^    {field} \(.*?(?=^    \S|\Z)", text, re.MULTILINE | re.DOTALL)
    return str(said)


def digest(written: str) -> str | None:
    """The hash of a place's text; None for a page."""
    text = described(written)
    return text and hashlib.sha256(" ".join(text.split()).encode()).hexdigest()[:12]


def render() -> str:
    """The table as docs/google_cloud_reference.md has it."""
    rules = [rule for row in TABLE.values() for rule in row["rules"]]
    hashed = sum("hash" in rule for rule in rules)
    fields = sum(len(row.get("fields", ())) for row in TABLE.values())
    ruled = sum(bool(row["rules"]) for row in TABLE.values())
    newest = max(rule["since"] for rule in rules if "since" in rule)
    lines = [
        f"{len(rules)} rules are checked, for {ruled} of the {len(TABLE)} methods that are called:",
        f"{hashed} as stated in the installed packages' protos and API descriptions, and",
        f"{len(rules) - hashed} as stated on Google's pages, the newest entered on {newest}.",
        f"Requests to gRPC methods set {fields} fields; no others are accepted.",
        "",
        "| call | right | rule, and the stand-in that keeps it | only Google can tell |",
        "|---|---|---|---|",
    ]
    for method, row in sorted(TABLE.items()):
        rights = [f"`{permission}`{_of(who, place)}" for who, permission, place in row["rights"]]
        kept: dict[str, list[str]] = {}
        for rule in row["rules"]:
            kept.setdefault(rule["kept_by"], []).append(rule["rule"])
        said = "; ".join(f"`{module}`: {', '.join(texts)}" for module, texts in kept.items())
        unknown = row.get("only_google", "")
        lines.append(f"| `{method}` | {', '.join(rights)} | {said} | {unknown} |")
    return "\n".join(lines) + "\n"


def _of(who: str, place: str) -> str:
    if who == "vertex_ai":
        return " of the Vertex AI Service Agent"
    return " on the account" if place.endswith("service_account") else ""


def document(text: str) -> str:
    """A page with the table of today in its place."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + render() + END + rest.partition(END)[2]


def as_json(table: dict[str, dict[str, Any]]) -> str:
    """The table with the parts of a rule or a right, and names of fields, on one line, as far as it
    has room for them."""
    text = json.dumps(table, indent=1)
    text = re.sub(r"(?<=[\[{])\n( {4}).*?\n {3}(?=[\]}])", _packed, text, flags=re.DOTALL)
    text = re.sub(r"(?<=\[\n)( {3})\"[^]{}]*(?=\n {2}\])", _packed, text)
    return re.sub(r"\[\n {3}(.{,80})\n {2}\]", r"[\1]", text) + "\n"


def _packed(row: re.Match[str]) -> str:
    lines: list[list[str]] = [[]]
    for part in row[0].strip().split(f",\n{row[1]}"):
        if sum(map(len, [*lines[-1], part])) > LINE:
            lines.append([])
        lines[-1].append(part)
    kept = row[1] if row[0].startswith(row[1]) else ""
    return kept + f",\n{row[1]}".join(", ".join(line) for line in lines)


def main() -> None:
    """Enter hashes, and the fields of recorded calls; write the table."""
    for call in Path(sys.argv[1]).read_text().splitlines() if sys.argv[1:] else []:
        method, field = call.split()
        TABLE[method]["fields"] = sorted({*TABLE[method]["fields"], field})
    for row in TABLE.values():
        for rule in row["rules"]:
            if text := digest(rule["written"]):
                rule["hash"] = text
    PATH.write_text(as_json(TABLE))
    DOCUMENT.write_text(document(DOCUMENT.read_text()))


if __name__ == "__main__":
    main()
