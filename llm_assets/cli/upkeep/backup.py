"""Commands that copy what cannot be made again, and bring it back."""

import os
from pathlib import Path

import click

from artifacts.shown import shown


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


BACKUP = (backup, restore)
