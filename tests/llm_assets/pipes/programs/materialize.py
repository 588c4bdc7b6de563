"""Materializes the test asset in this process: `materialize.py SERVICE FINGERPRINT STEP...`."""

import sys

from tests.llm_assets.pipes.runner import Runner


def main() -> None:
    service, fingerprint, *steps = sys.argv[1:]
    result = Runner(service, fingerprint=fingerprint).run(steps)
    sys.exit(0 if result.success else 1)


if __name__ == "__main__":
    main()
