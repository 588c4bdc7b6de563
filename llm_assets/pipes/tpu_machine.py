"""What a TPU machine does: run one container, report its state to the bucket, delete itself.

`tpu_vm.py` passes this file to Google as the machine's `startup-script`. The machine's own Python
runs it, also after a reboot, so it uses only the standard library (3.10).
"""

import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from http import HTTPStatus
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

ATTRIBUTE = "llm-assets-job"
"""The machine's attribute that says what to run."""
# Google's own libraries read the same variables, which name stand-ins for the services.
METADATA = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
STORAGE = os.environ.get("STORAGE_EMULATOR_HOST", "https://storage.googleapis.com")
TPU_API = os.environ.get("TPU_API_HOST", "https://tpu.googleapis.com")
CALL_SECONDS = 60.0
RETRY_SECONDS = 10.0
LAST_WORD_SECONDS = 600.0
"""How long the machine tries to read its record, and to write how it ended, before it goes on."""
SECONDS_TO_END = 120
"""How long a container that reached its deadline has to save its state."""
REGISTRIES = (".pkg.dev", ".gcr.io")
MOUNT = """bucket=$1 folder=$2 key=/usr/share/keyrings/cloud.google.asc
if ! command -v gcsfuse; then
    apt=https://packages.cloud.google.com/apt
    curl -fsS $apt/doc/apt-key.gpg -o $key
    echo "deb [signed-by=$key] $apt gcsfuse-$(lsb_release -cs) main" \
        > /etc/apt/sources.list.d/gcsfuse.list
    apt-get -o DPkg::Lock::Timeout=300 update
    apt-get -o DPkg::Lock::Timeout=300 install -y gcsfuse
fi
mkdir -p $folder
mountpoint -q $folder || gcsfuse --implicit-dirs -o allow_other $bucket $folder
"""
"""As Google's pages "Install Cloud Storage FUSE" and "Mount a bucket" have it."""


def main() -> None:
    """Do the work, unless it has ended before, then request this machine's deletion for good.

    Whatever fails on the way is retried, since a script that ends leaves a machine that is billed.
    """
    job = insist(lambda: json.loads(read_metadata(f"attributes/{ATTRIBUTE}")))
    record = read_record(job) or {"started": time.time()}
    if "ended" not in record:
        ended = threading.Event()
        reporter = threading.Thread(target=keep_record, args=(job, record, ended))
        reporter.start()
        try:
            # Counted from the first boot, so that a machine that reboots again and again ends, too.
            record.update(run(job, record["started"] + job["seconds"]))
        except subprocess.TimeoutExpired as error:
            step = " ".join(error.cmd[:2])
            record["told"] = (
                f"it was ended after its greatest duration of {job['seconds']:,} s, in `{step}`"
            )
        except Exception:
            # Whatever the error, the run has to learn it, and the machine has to be deleted.
            record["told"] = traceback.format_exc(limit=1)
        record["ended"] = time.time()
        ended.set()
        # Before the deletion: nothing else says how the work ended once the machine is gone.
        reporter.join()
    while True:
        # Until this script is gone with its machine: an accepted request is no deletion yet.
        insist(lambda: call("DELETE", f"{TPU_API}/v2/{job['node']}"))
        time.sleep(RETRY_SECONDS)


def run(job: dict[str, Any], deadline: float) -> dict[str, Any]:
    """Run the container; its exit code, or in words why it has none.

    Raises:
        subprocess.TimeoutExpired: a step is not done at the deadline, and was ended.
    """

    def step(*command: str, **options: Any) -> "subprocess.CompletedProcess[str]":
        remaining = max(0.0, deadline - time.time())
        return subprocess.run(command, text=True, timeout=remaining, **options)

    image, registry = job["image"], job["image"].split("/")[0]
    # Only Google's own registries may see the token. The leading dot lets gcr.io itself pass, but
    # no name that merely ends in it.
    if f".{registry}".endswith(REGISTRIES):
        login = ("docker", "login", "-u", "oauth2accesstoken", "--password-stdin")
        step(*login, f"https://{registry}", input=insist(token, LAST_WORD_SECONDS), check=True)
    pulled = step("docker", "pull", image, capture_output=True, check=False)
    if pulled.returncode:
        return {"told": f"docker pull {image}: {pulled.stderr.strip()[-500:]}"}
    volumes = []
    if folder := job.get("mount"):
        step("bash", "-ec", MOUNT, "mount", job["bucket"], folder, check=True)
        volumes = [f"--volume={folder}:{folder}"]
    # Left over if the machine was rebooted.
    step("docker", "rm", "--force", job["name"], check=False)
    variables = [f"--env={name}={value}" for name, value in job["environment"].items()]
    # Privileged, since the chips are devices of the machine, below /dev/vfio.
    # By gcplogs the lines reach Cloud Logging, where `TpuVms.log_filter` finds them by the
    # container's name.
    options = ["--rm", "--privileged", "--network=host", "--log-driver=gcplogs", *job["options"]]
    command = ["docker", "run", f"--name={job['name']}", *options, *volumes, *variables]
    container = subprocess.Popen([*command, image, *job["arguments"]])
    try:
        return {"exit": container.wait(max(0.0, deadline - time.time()))}
    except subprocess.TimeoutExpired:
        stop = ["docker", "stop", f"--time={SECONDS_TO_END}", job["name"]]
        subprocess.run(stop, timeout=SECONDS_TO_END + CALL_SECONDS, check=False)
        raise


def insist(ask: Callable[[], Any], seconds: float = float("inf")) -> Any:
    """The result of a call, repeated until it works; after that time its last error is raised."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return ask()
        except Exception as error:
            if time.monotonic() > deadline:
                raise
            print(f"trying again: {error!r}", file=sys.stderr, flush=True)
            time.sleep(RETRY_SECONDS)


def keep_record(job: dict[str, Any], record: dict[str, Any], ended: threading.Event) -> None:
    """Write the record again and again as a sign of life, at last with how the work has ended."""
    object_path = f"{job['record_bucket']}/o?uploadType=media&name={quote(job['record'], safe='')}"
    while True:
        # Read before the record: if the work ends in between, what is written now is not the last
        # word, and the loop comes round again.
        is_last = ended.is_set()
        try:
            content = json.dumps({**record, "seen": time.time()}).encode()
            call("POST", f"{STORAGE}/upload/storage/v1/b/{object_path}", content)
            if is_last:
                return
        except Exception as error:
            print(f"{job['record']} cannot be written: {error}", file=sys.stderr, flush=True)
            if is_last and time.time() - record["ended"] > LAST_WORD_SECONDS:
                return
        if is_last:
            time.sleep(RETRY_SECONDS / 10)
        else:
            ended.wait(job["report_seconds"])


def read_record(job: dict[str, Any]) -> dict[str, Any]:
    """What this machine wrote before a reboot; empty on its first boot."""
    object_path = f"{job['record_bucket']}/o/{quote(job['record'], safe='')}"

    def read() -> Any:
        try:
            return json.loads(call("GET", f"{STORAGE}/storage/v1/b/{object_path}?alt=media"))
        except HTTPError as error:
            if error.code != HTTPStatus.NOT_FOUND:
                raise
            return {}

    try:
        return dict(insist(read, LAST_WORD_SECONDS))
    except Exception as error:
        # Without a record the work is repeated, from its newest checkpoint: better than not at all.
        print(f"{job['record']} cannot be read: {error!r}", file=sys.stderr, flush=True)
        return {}


def call(method: str, url: str, content: bytes | None = None) -> str:
    """Call a service of Google's as the machine's account."""
    headers = {"Authorization": f"Bearer {token()}", "Content-Type": "application/json"}
    return _ask(Request(url, content, headers, method=method))  # noqa: S310 - Google's own


def token() -> str:
    """A token of the machine's account."""
    return str(json.loads(read_metadata("service-accounts/default/token"))["access_token"])


def read_metadata(path: str) -> str:
    """What the machine's metadata server says."""
    url = f"http://{METADATA}/computeMetadata/v1/instance/{path}"
    return _ask(Request(url, headers={"Metadata-Flavor": "Google"}))


def _ask(request: Request) -> str:
    with urlopen(request, timeout=CALL_SECONDS) as reply:  # noqa: S310 - as above
        return str(reply.read().decode())


if __name__ == "__main__":
    main()
