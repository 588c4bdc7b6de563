"""The `vllm` command: parses, validates, then does what was asked for."""

import argparse

from vllm.entrypoints.cli.serve import ServeSubcommand


def main() -> None:
    parser = argparse.ArgumentParser()
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers()).set_defaults(dispatch_function=command.cmd)
    arguments = parser.parse_args()
    command.validate(arguments)
    arguments.dispatch_function(arguments)
