"""Where the files of shards are: in a local folder, or in an object store behind a local cache."""

import hashlib
from pathlib import Path

from artifacts.errors import DamagedArtifact, make_command, mend_command
from artifacts.leases.lease import local_lease
from artifacts.storage import files
from artifacts.storage.machine import cache_folder


class ShardFiles:
    """The files of one shards folder, each given as a local path."""

    def __init__(self, url: str | Path, cache: Path | None = None) -> None:
        """Look at the folder, reading no file.

        Args:
            url: a local folder, or a URL such as `gs://bucket/prefix`.
            cache: folder that keeps copies of what is in an object store, by default this machine's
                own (`artifacts.storage.machine`). Processes of one machine share it.
        """
        self.url = str(url)
        name = hashlib.sha256(self.url.encode()).hexdigest()[:16]
        self._cache = (cache or cache_folder() / "shards") / name
        self._sizes = files.list_sizes(self.url)
        if not self._sizes:
            raise DamagedArtifact(
                f"{self.url} is absent. Make it with: {make_command('tokenized_shards')}"
            )

    def check(self, name: str, expected: int | None = None) -> None:
        """Compare what the folder lists with what a manifest says.

        Args:
            expected: the file's size in bytes; None where only its presence is known.

        Raises:
            DamagedArtifact: the file is absent, or of another size.
        """
        found = self._sizes.get(name)
        if found is None:
            raise DamagedArtifact(
                f"{self.url}/{name} is absent, though its manifest lists it. Set the shards aside "
                f"and make them again with: {mend_command(self.url)}"
            )
        if expected is not None and found != expected:
            raise DamagedArtifact(
                f"{self.url}/{name} has {found} bytes where its manifest means {expected}. Set the "
                f"shards aside and make them again with: {mend_command(self.url)}"
            )

    def fetch(self, name: str) -> Path:
        """A local path of the file; what is in an object store is copied on first use, whole.

        Raises:
            DamagedArtifact: the file is absent.
        """
        self.check(name)
        if files.is_local(self.url):
            return Path(self.url.removeprefix("file://"), name)
        local = self._cache / name
        with local_lease(self._cache / f"{name}.lock"):
            if not local.exists() or local.stat().st_size != self._sizes[name]:
                files.download(f"{self.url}/{name}", local)
        return local
