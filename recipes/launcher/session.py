"""Runs what came over ssh in the environment that the launcher kept in a file.

`session.py environment.json`, the command in SSH_ORIGINAL_COMMAND; without one it is a shell. It
stands alone, as a server starts it in an empty environment.
"""

import json
import os
import sys

SHELL = "/bin/sh"


def main() -> None:
    """Become the command."""
    with open(sys.argv[1]) as file:
        environment = json.load(file)
    command = os.environ.get("SSH_ORIGINAL_COMMAND")
    arguments = ["-c", command] if command else ["-i"]
    os.execve(SHELL, [SHELL, *arguments], environment)  # noqa: S606 - the accepted key's holder


if __name__ == "__main__":
    main()
