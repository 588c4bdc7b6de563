"""Imports what Dagster's commands use, without the names of its private modules."""

from importlib.metadata import entry_points

from dagster import DagsterInstance

for command in entry_points(group="console_scripts", name="dagster"):
    command.load()
DagsterInstance.ephemeral()
