"""Writes the digest of its base image into a Dockerfile, so that every build starts from the same.

    python3 images/pin.py images/spark/Dockerfile

`FROM name:tag` becomes `FROM name:tag@sha256:…`, what the registry has under that tag now. Run it
again to take a newer base. `images/build.sh` runs it where a Dockerfile has no digest yet.
"""

import json
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

FROM = re.compile(r"^FROM (?P<name>[^\s:@]+(?::\d+/[^\s:@]+)?):(?P<tag>[\w.-]+)(?:@\S+)?$", re.M)
CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
KINDS = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
"""Lists of an image's builds for several machines first: their digest is good for all."""
SECONDS = 30


def main(arguments: list[str]) -> int:
    """Pin the named Dockerfiles; returns 1 with one line where that cannot be done."""
    if not arguments:
        print("usage: python3 images/pin.py DOCKERFILE...", file=sys.stderr)
        return 2
    for path in map(Path, arguments):
        place = str(path)
        try:
            text = path.read_text()
            base = FROM.search(text)
            if base is None:
                raise ValueError("expected a line `FROM name:tag`.")
            image = f"{base['name']}:{base['tag']}"
            place = f"{path}: {image}"
            pinned = f"FROM {image}@{find_digest(base['name'], base['tag'])}"
            if pinned != base[0]:
                path.write_text(text.replace(base[0], pinned))
                print(f"{path}: {pinned}. Commit it: others build from the same.", file=sys.stderr)
        except (OSError, ValueError) as error:
            print(f"{place}: {error}", file=sys.stderr)
            return 1
    return 0


def find_digest(name: str, tag: str) -> str:
    """Ask the image's registry, Docker Hub where the name has none, as anyone may.

    Raises:
        OSError: it cannot be reached, or has no such image for anyone.
        ValueError: its answer has no digest.
    """
    host, path = split_name(name)
    scheme = "http" if host.startswith(("localhost:", "127.0.0.1:")) else "https"
    url = f"{scheme}://{host}/v2/{path}/manifests/{tag}"
    try:
        digest = _ask(url, {})
    except urllib.error.HTTPError as error:
        if error.code != 401:
            raise
        challenge = dict(CHALLENGE.findall(error.headers.get("www-authenticate", "")))
        digest = _ask(url, {"Authorization": f"Bearer {_token(challenge)}"})
    if not DIGEST.fullmatch(digest):
        raise ValueError(f"{url} answers without a digest; expected Docker-Content-Digest")
    return digest


def split_name(name: str) -> tuple[str, str]:
    """Registry and path, by Docker's rules for names without a registry or an owner."""
    first, _, rest = name.partition("/")
    if rest and ("." in first or ":" in first or first == "localhost"):
        return first, rest
    return "registry-1.docker.io", name if rest else f"library/{name}"


def _ask(url: str, headers: dict[str, str]) -> str:
    # HEAD: Docker Hub counts only GET as a pull, and allows few pulls in an hour.
    request = urllib.request.Request(  # noqa: S310 - the scheme is one of the two above
        url, headers=headers | {"Accept": ", ".join(KINDS)}, method="HEAD"
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:  # noqa: S310
        return str(answer.headers.get("docker-content-digest", ""))


def _token(challenge: dict[str, str]) -> str:
    """A token for reading public images (https://distribution.github.io/distribution/spec/auth)."""
    if not challenge.get("realm", "").startswith(("https://", "http://127.0.0.1:")):
        raise ValueError("the registry asks for a login in a way that is not known here")
    query = {name: value for name, value in challenge.items() if name in ("service", "scope")}
    url = f"{challenge['realm']}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=SECONDS) as answer:  # noqa: S310
        content = json.load(answer)
    # The protocol of OAuth 2.0, which some registries speak, has the second name.
    given = content if isinstance(content, dict) else {}
    token = given.get("token") or given.get("access_token")
    if not token:
        raise ValueError(
            f"{challenge['realm']} gives no token for reading it, so it is not public: write its "
            "digest behind the tag yourself (`FROM name:tag@sha256:...`)"
        )
    return str(token)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
