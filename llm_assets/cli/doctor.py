"""`llm-assets doctor`: what is wrong in a store, in words, and its repair."""

from collections.abc import Callable, Sequence

from llm_assets.cli.session import Session
from llm_assets.endpoint.folder import endpoint_folder
from llm_assets.maintenance.doctor import check_artifacts, parse_name
from llm_assets.maintenance.examine import (
    check_caches,
    check_endpoint,
    check_record,
    check_registry,
    check_retired,
    check_runs,
)
from llm_assets.maintenance.inventory import take_inventory

Report = Callable[[str], None]


def examine(session: Session, names: Sequence[str], repair: bool, report: Report) -> bool:
    """Report every finding, then mend what can be mended if asked to.

    Args:
        names: artifacts as `kind/fingerprint`; empty for the whole store.

    Returns:
        Whether everything is in order now.
    """
    store = session.pipeline.store
    inventory = take_inventory(store)
    artifacts = [parse_name(name) for name in names] or list(inventory.artifacts())
    findings = list(check_artifacts(store, artifacts))
    if not names:
        findings += check_record(session.pipeline.record, session.registry)
        findings += check_runs(store, inventory)
        findings += check_caches(store, inventory)
        findings += check_retired(store)
        findings += check_registry(store, session.registry, session.settings.name)
        if store.is_local:
            findings += check_endpoint(session.registry, endpoint_folder(session.settings))
    for finding in findings:
        report(f"{finding.place}: {finding.fault}.")
        can_mend = "" if finding.repair is None else "With --repair: "
        report(f"  {'' if repair else can_mend}{finding.remedy}.")
    if not findings:
        report(f"{len(artifacts)} artifacts checked in {store.root}: everything is in order.")
    faults = [finding for finding in findings if finding.is_fault]
    if not repair:
        return not faults
    left = []
    for finding in faults:
        if finding.repair:
            finding.repair()
        else:
            left.append(finding)
    report(f"{len(faults) - len(left)} of {len(faults)} faults mended.")
    return not left
