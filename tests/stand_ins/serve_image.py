"""What stands for the serve image: its own program, with this project's server for the engine."""

import sys

from tests.stand_ins.processes import LocalImage

ENGINE = (sys.executable, "-m", "serving", "--model", "{model}", "--port", "{port}")
ENGINE += ("--name", "{name}")


def serve_image() -> LocalImage:
    """An image whose containers listen on loopback alone."""
    return LocalImage(
        entrypoint=(sys.executable, "-m", "serving.vertex.container", "--", *ENGINE),
        environment={"HOST": "127.0.0.1", "OMP_NUM_THREADS": "1"},
    )
