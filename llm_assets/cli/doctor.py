"""`llm-assets doctor`: what is wrong in a store, for people and for programs, and its repair."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llm_assets.cli.session import Session
from llm_assets.endpoint.folder import endpoint_folder
from llm_assets.maintenance.examine import (
    StoreFault,
    check_artifacts,
    check_caches,
    check_editions,
    check_endpoint,
    check_forgotten,
    check_making,
    check_record,
    check_registry,
    check_retired,
    check_runs,
    parse_name,
)
from llm_assets.maintenance.retention import take_inventory


@dataclass(frozen=True)
class Examination:
    """What a store was found to be like."""

    root: str
    artifacts: int
    """So many were read."""
    findings: list[StoreFault]

    @property
    def faults(self) -> list[StoreFault]:
        """The findings that are more than worth knowing."""
        return [finding for finding in self.findings if finding.is_fault]

    def repair(self) -> list[StoreFault]:
        """Mend what can be mended; returns the faults that are left."""
        left = []
        for finding in self.faults:
            if finding.repair:
                finding.repair()
            else:
                left.append(finding)
        return left

    def lines(self, repairing: bool) -> Iterator[str]:
        """Every finding with its remedy, in words."""
        for finding in self.findings:
            yield f"{finding.place}: {finding.fault}."
            can_mend = "" if repairing or finding.repair is None else "With --repair: "
            yield f"  {can_mend}{finding.remedy}."
        if not self.findings:
            yield f"{self.artifacts} artifacts checked in {self.root}: everything is in order."

    def as_json(self, left: Sequence[StoreFault]) -> dict[str, Any]:
        """The same as JSON values.

        Args:
            left: the faults that are still there.
        """
        return {
            "store": self.root,
            "artifacts": self.artifacts,
            "in_order": not left,
            "findings": [
                {
                    "place": finding.place,
                    "fault": finding.fault,
                    "remedy": finding.remedy,
                    "is_fault": finding.is_fault,
                    "can_be_mended": finding.repair is not None,
                    "mended": finding.is_fault and finding not in left,
                }
                for finding in self.findings
            ],
        }


def examine(session: Session, names: Sequence[str]) -> Examination:
    """Read a store, or some artifacts of it, byte by byte.

    Args:
        names: artifacts as `kind/fingerprint`; empty for the whole store.
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
        findings += check_forgotten(store, session.settings.name)
        findings += check_making(store)
        findings += check_editions(store)
        findings += check_registry(store, session.registry, session.settings.name)
        if store.is_local:
            findings += check_endpoint(session.registry, endpoint_folder(session.settings))
    return Examination(store.root, len(artifacts), findings)
