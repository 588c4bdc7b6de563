"""Prints pip's configuration as the environment variables that uv reads, for a shell to evaluate.

It is where a machine's package indexes, folders of wheels, proxy and certificates are named, and uv
reads none of it. What is set for uv already stays.
"""

import os
import shlex
import subprocess
import sys

VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
    "trusted-host": "UV_INSECURE_HOST",
    "no-index": "UV_NO_INDEX",
}


def main() -> None:
    """Ask pip, which knows its files and the environment, and print one line a variable."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    settings: dict[str, str] = {}
    for line in listed.splitlines():
        # Such as `global.index-url='https://…'`; what comes later counts for more.
        key, _, value = line.partition("=")
        settings[key.rpartition(".")[2]] = " ".join(shlex.split(value)).replace("\\n", " ").strip()
    for name, variable in VARIABLES.items():
        if settings.get(name) and variable not in os.environ:
            print(f"export {variable}={shlex.quote(settings[name])}")
    # As pip does: of all indexes the best version, here the locked one, whose hash decides.
    print("export UV_INDEX_STRATEGY=unsafe-best-match")
    if os.path.exists("/etc/ssl/certs/ca-certificates.crt"):
        # The machine's own certificates, as pip takes them, a company's among them.
        print("export UV_SYSTEM_CERTS=1 UV_NATIVE_TLS=1")


if __name__ == "__main__":
    main()
