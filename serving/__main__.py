"""Run the endpoint: `python -m serving --model FOLDER --version 3 --port 8010`."""

import argparse
import sys
import tempfile
from pathlib import Path

from artifacts.errors import UserError
from artifacts.program.lifetime import use_own_temporary_folder
from serving.settings import EndpointSettings, bearer_token, listen
from serving.state import Desired, StateFolder
from serving.supervisor import Supervisor


def main() -> int:
    """Serve in the foreground until a signal; exit code 1 where it cannot begin."""
    parser = argparse.ArgumentParser(prog="python -m serving", description=__doc__)
    served = parser.add_mutually_exclusive_group(required=True)
    served.add_argument("--state", type=Path, help="folder that says what to serve")
    served.add_argument("--model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--log", type=Path, help="file for what is logged; else standard error")
    parser.add_argument("--name", default="default", help="what clients call the model")
    parser.add_argument("--version", default="1", help="name of the model's version")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=EndpointSettings().port)
    arguments = parser.parse_args()
    use_own_temporary_folder()
    try:
        if arguments.state:
            return serve(StateFolder(arguments.state), arguments.log)
        with tempfile.TemporaryDirectory(prefix="llm-assets-endpoint-") as scratch:
            state = StateFolder(Path(scratch))
            state.desired.write(
                Desired(
                    model_folder=arguments.model,
                    name=arguments.name,
                    version=arguments.version,
                    fingerprint="unregistered",
                    settings=EndpointSettings(host=arguments.host, port=arguments.port),
                )
            )
            return serve(state, arguments.log)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1


def serve(state: StateFolder, log_path: Path | None) -> int:
    """Serve what a state folder wants, until a signal; raises UserError where it cannot begin."""
    desired = state.desired.read()
    if desired is None:
        raise UserError(f"{state.folder} does not say what to serve: it has no desired.json.")
    settings = desired.settings
    bearer_token(settings)
    with listen(settings.host, settings.port) as listener:
        return Supervisor(state, listener, settings.engine_timeout, log_path).run()


if __name__ == "__main__":
    sys.exit(main())
