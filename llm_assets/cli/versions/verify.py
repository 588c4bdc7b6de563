"""`llm-assets verify`: a certificate of what was forgotten, or an exported model, checked."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from artifacts.errors import UserError
from artifacts.progress import Report
from artifacts.shown import shown_in_line
from llm_assets.cli.session import Session
from llm_assets.export.signature import check_signature
from llm_assets.forgetting.certificate import Forgetting, read_statement
from llm_assets.forgetting.signing import read_signed
from llm_assets.forgetting.verification import examine, is_here, train_again


def verify_export(folder: Path, key: Path | None, report: Report) -> None:
    """Check the signature of an exported model; raises UserError where it does not hold."""
    if key is None:
        raise UserError(
            f"The signature of {folder} says nothing without its issuer's public key: give that "
            "with --key."
        )
    files = check_signature(folder, key)
    report(f"ok       {files:,} files are as they were signed with the key of {key}")


def verify_certificate(
    opened: Callable[[], Session], path: Path, key: Path | None, retrain: bool, report: Report
) -> bool:
    """Check the signature, then everything that is stated; returns whether all of it holds.

    Raises:
        UserError: the certificate cannot be read, was changed, is signed with another key, or is
            about another store's pipeline.
    """
    statement, signed_by = read_signed(path, key)
    stated = read_statement(statement, path)
    trusted = "" if key else ", which the certificate itself names: --key has the issuer's"
    report(f"ok       signed with the key {signed_by}{trusted}")
    for line in _stated(stated):
        report(f"         {line}")
    session = opened()
    if not is_here(session.pipeline.record, stated):
        raise UserError(
            f"It is about the pipeline {stated.pipeline!r}, and the store "
            f"{session.pipeline.store.root} of {session.settings.name!r} has no list of what that "
            "has forgotten. Name its pipeline file with --config."
        )
    findings = list(examine(session.pipeline.record, session.registry.state(), stated))
    if retrain:
        store = session.pipeline.store
        findings += [train_again(store, one, report) for one in stated.replaced]
    for holds, text in findings:
        report(f"{'ok      ' if holds else 'PROBLEM '} {text}")
    return all(holds for holds, _ in findings)


def _stated(stated: Forgetting) -> Iterator[str]:
    for one in stated.documents:
        yield (
            f"{shown_in_line(one.id)}, forgotten {one.at:%Y-%m-%d} by {shown_in_line(one.by)}: "
            f"{shown_in_line(one.reason)}"
        )
    for reading in stated.read_by:
        steps = sum(len(of_run) for of_run in reading.steps.values())
        yield f"version {reading.version} was trained on it in {steps:,} steps"
    if stated.memory:
        yield from told(stated.memory)


def told(memory: Mapping[str, Any]) -> Iterator[str]:
    """What was measured of the models' memory, in lines."""
    yield f"memory, beside {memory['controls']:,} texts that were never trained on:"
    for role, texts in memory["models"].items():
        for text, one in texts.items():
            exact = one["exact_continuation"]
            continued = "too short to be continued" if exact is None else f"{exact:.0%} continued"
            yield (
                f"  {role:<6} {text}: rank {one['rank']} of {memory['controls'] + 1}, "
                f"{one['bits_per_byte']:.3f} bits per byte, {continued}"
            )
