"""Options that several commands have."""

import getpass

import click

version_argument = click.argument("version", type=int)
name_option = click.option("--name", default=getpass.getuser, help="Who decides; you by default.")
reason_option = click.option("--reason", required=True, help="Reason, recorded with the decision.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
