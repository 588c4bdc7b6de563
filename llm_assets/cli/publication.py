"""`llm-assets publish VERSION OWNER/NAME`: a version in a repository of the Hugging Face Hub."""

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from artifacts.errors import UserError, first_line
from artifacts.progress import Report, counted
from artifacts.storage import files
from artifacts.storage.transfer import download_folder, remote_entries
from llm_assets.cli.session import Session
from llm_assets.cloud.jobs import HUB_VARIABLE
from llm_assets.forgetting.forgotten_list import read_list
from llm_assets.registry.card import describe_coverage, figures_table, verify_model
from llm_assets.registry.state import ModelVersion

CARD, METRICS, SETTINGS = "README.md", "metrics.json", "settings.json"
TOLD = ("tokenized_shards", "checkpoint")
"""Assets whose settings are published: they say how the model was trained, not on what."""


def publish_version(
    session: Session, number: int, repository: str, public: bool, report: Report
) -> str:
    """Upload a version's model with its card, figures and settings as one commit; its address.

    Raises:
        UserError: there is no token or no such version; its files are damaged, or it was withdrawn;
            the Hub refuses, or the repository is public where it should not be.
    """
    version = session.registry.state().get(number)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise UserError(f"{repository!r} is not a Hugging Face repository: give OWNER/NAME.")
    token = os.environ.get(HUB_VARIABLE)
    if not token:
        raise UserError(
            f"{HUB_VARIABLE} is not set. Set it to a token with write access to {repository} "
            "(https://huggingface.co/settings/tokens)."
        )
    read_list(session.record.store, session.settings.name).refuse_withdrawn(number)
    verify_model(session.record, version.model_url, weights=version.weights)

    import httpx
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi(token=token)
    try:
        api.create_repo(repository, private=not public, exist_ok=True)
        # `exist_ok` leaves a repository that exists as public as it is.
        if not public and not api.repo_info(repository).private:
            raise UserError(
                f"{repository} already exists and is public. Make it private on the Hub, or pass "
                "--public."
            )
        # The Hub's client cannot read a bucket.
        with tempfile.TemporaryDirectory() as copy:
            folder = Path(version.model_url)
            if not files.is_local(version.model_url):
                folder = Path(copy)
                download_folder(version.model_url, remote_entries(version.model_url), folder)
            additions = {name: text.encode() for name, text in _told(session, version).items()}
            contents = {path.name: path for path in sorted(folder.iterdir())} | additions
            report(f"Uploading {counted(len(contents), 'file')} to {repository}")
            done = api.create_commit(
                repository,
                [CommitOperationAdd(name, content) for name, content in contents.items()],
                commit_message=f"Version {version.version} of {session.settings.name}",
            )
    except (HfHubHTTPError, httpx.HTTPError) as error:
        answer = getattr(error, "response", None)
        fault = f"answered {answer.status_code}" if answer is not None else "could not be reached"
        raise UserError(
            f"The Hub {fault} during the upload to {repository}: {first_line(error).rstrip('.')}. "
            "All files are uploaded in one commit, so none is there without the others. Check the "
            f"permissions of the token in {HUB_VARIABLE} and try again."
        ) from None
    return f"Version {version.version} is at {done.commit_url}"


def _told(session: Session, version: ModelVersion) -> dict[str, str]:
    """The files beside the model, name to text; none contains a path, name or text of this side."""
    store = session.record.store
    manifests = {
        asset: store.load(asset, fingerprint).manifest
        for asset, fingerprint in version.lineage.items()
        # Cleaning may have removed what an older version was made from; the card then says less.
        if store.exists(asset, fingerprint)
    }
    settings = {asset: manifests[asset].settings for asset in TOLD if asset in manifests}
    metrics: dict[str, Any] = version.evaluation.get("metrics", {})
    data = manifests["raw_corpus"].stats if "raw_corpus" in manifests else {}
    license = version.license.lower()
    lines = [
        "---",
        f"license: {license if re.fullmatch(r'[a-z0-9.-]+', license) else 'unknown'}",
        "library_name: transformers",
        "---",
        f"# {session.settings.name}, version {version.version}",
        "",
        session.settings.description,
        "",
        f"- License: {version.license}",
        f"- Trained on: {describe_coverage(version)}",
        *(f"- Text: {data[unit]:,} {unit}" for unit in ("documents", "bytes") if unit in data),
        f"- Training settings: [{SETTINGS}]({SETTINGS}); metrics: [{METRICS}]({METRICS})",
        "",
        *figures_table(version),
        "## Made from",
        "",
        *(f"- {asset}: `{fingerprint}`" for asset, fingerprint in version.lineage.items()),
    ]
    return {
        CARD: "\n".join(lines) + "\n",
        METRICS: json.dumps(metrics, indent=2),
        SETTINGS: json.dumps(settings, indent=2),
    }
