"""Commands that look after the store: what may go, what is damaged, copies of it."""

import json
import os
import sys
from pathlib import Path

import click

from artifacts.shown import shown
from llm_assets.cli.options import json_option


@click.command()
@click.option("--yes", is_flag=True, help="Remove what is listed.")
@json_option
def clean(yes: bool, as_json: bool) -> None:
    """List what the `retention` settings no longer keep in the store, and remove it with --yes.

    \b
    Examples:
      llm-assets clean          what would go, and why
      llm-assets clean --yes
    """
    from llm_assets.cli.session import open_session
    from llm_assets.maintenance.clean import clean as clean_store

    session = open_session()
    settings = session.settings
    cleaning = clean_store(
        session.pipeline.record,
        session.registry,
        settings.retention,
        settings.forgetting,
        yes,
        (lambda line: None) if as_json else click.echo,
    )
    if as_json:
        click.echo(json.dumps(cleaning.as_json() | {"removed": yes}, indent=2))
    elif cleaning.removals and not yes:
        click.echo("Nothing was removed. Remove it with: llm-assets clean --yes")


@click.command()
@click.argument("artifacts", nargs=-1)
@click.option("--repair", is_flag=True, help="Mend what can be mended, after the listing.")
@json_option
def doctor(artifacts: tuple[str, ...], repair: bool, as_json: bool) -> None:
    """Check the whole store, or the ARTIFACTS named as kind/fingerprint, byte by byte.

    \b
    Examples:
      llm-assets doctor
      llm-assets doctor --repair
      llm-assets doctor checkpoint/0123456789abcdef0123
    """
    from llm_assets.cli.session import open_session
    from llm_assets.cli.upkeep.doctor import examine

    examination = examine(open_session(), artifacts)
    if not as_json:
        for line in examination.lines(repair):
            click.echo(shown(line))
    faults = examination.faults
    left = examination.repair() if repair else faults
    if as_json:
        click.echo(json.dumps(examination.as_json(left), indent=2))
    elif repair:
        click.echo(f"{len(faults) - len(left)} of {len(faults)} faults mended.")
    if left:
        sys.exit(1)


@click.command()
def restore_registry() -> None:
    """Put the registry's state before its last change in the place of a lost or damaged one.

    \b
    Example:
      llm-assets restore-registry
    """
    from llm_assets.cli.session import open_session

    state = open_session().registry.restore()
    click.echo(f"The registry is as it was before its last change, {len(state.versions)} versions.")
    click.echo("`llm-assets versions` lists them; materialize the graph to enter the newest again.")


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def backup(folder: Path) -> None:
    """Add a snapshot of store, registry, Dagster's history and settings to FOLDER.

    Runs may go on meanwhile. Artifacts that FOLDER has already are not copied again.

    \b
    Example:
      llm-assets backup /mnt/backup/manuals
    """
    from llm_assets.backup.take import back_up
    from llm_assets.cli.session import use_this_folders_history
    from llm_assets.config import config_path, load_settings

    use_this_folders_history()
    config = config_path()
    snapshot = back_up(load_settings(config), config, folder, lambda line: click.echo(shown(line)))
    click.echo(shown(f"Backup {snapshot} is complete. Elsewhere: llm-assets restore {folder}"))


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def restore(folder: Path) -> None:
    """Bring the newest snapshot of FOLDER into this folder, where neither store nor history is yet.

    Settings files that are here already stay, so that `store` can be set to another place before.

    \b
    Example:
      llm-assets restore /mnt/backup/manuals
    """
    from llm_assets.backup.restore import restore as bring_back
    from llm_assets.config import CONFIG_VARIABLE

    named = os.environ.get(CONFIG_VARIABLE)
    config = bring_back(
        folder, Path(named) if named else None, lambda line: click.echo(shown(line))
    )
    click.echo(shown(f"Restored. Check it: llm-assets --config {config} doctor"))


MAINTENANCE = (clean, doctor, restore_registry, backup, restore)
