"""`llm-assets export`: a version's model in the form that another program runs."""

from pathlib import Path

from llm_assets.cli.session import Session
from llm_assets.export.export import Form, export_model
from llm_assets.registry.integrity import verify_model


def export_version(
    session: Session, version: int, form: Form, output: Path | None, key: Path | None
) -> str:
    """Write a version's model into a new folder; returns what there is to say about it.

    Raises:
        UserError: there is no such version, its model was deleted, is damaged or is not on this
            machine, the folder exists, the form does not take the model, or the key is none.
    """
    found = session.registry.get(version)
    store = session.pipeline.store
    model = store.local_path(found.model_url)
    verify_model(session.pipeline.record, found.model_url)
    name = f"{session.settings.name}-{version}"
    target = output or Path(f"{name}-{form}")
    compared = export_model(model, form, target, name, key)
    signed = f" Signed: llm-assets verify {target} --key {key.with_suffix('.pub')}" if key else ""
    return (
        f"Wrote {target}. Read back, it needs {compared.served:.4f} bits per byte for the shipped "
        f"text; the model needs {compared.evaluated:.4f}.{signed}"
    )
