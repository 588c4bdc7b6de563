"""Run the endpoint of a state folder (`serving/endpoint.py`), until a signal."""

import argparse
import sys
from pathlib import Path

from artifacts.errors import UserError
from artifacts.program.lifetime import use_own_temporary_folder
from serving.settings import bearer_token, listen
from serving.state import StateFolder
from serving.supervisor import Supervisor


def main() -> int:
    """Exit code 1 where serving cannot begin."""
    parser = argparse.ArgumentParser(prog="python -m serving", description=__doc__)
    parser.add_argument("--state", type=Path, required=True, help="folder that says what to serve")
    arguments = parser.parse_args()
    use_own_temporary_folder()
    state = StateFolder(arguments.state)
    try:
        desired = state.desired.read()
        if desired is None:
            raise UserError(f"{state.folder} does not say what to serve: it has no desired.json.")
        bearer_token(desired.settings)
        with listen(desired.settings.host, desired.settings.port) as listener:
            return Supervisor(state, listener).run()
    except UserError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
