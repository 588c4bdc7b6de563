"""llama.cpp's server, built from the source package of llama-cpp-python: a peer of the endpoint.

It is built once, into `build/llama_cpp` (about ten minutes on two cores), where cmake and a C++
compiler are. No AMX: what GCC 12 makes of that part dies with SIGILL.
"""

import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.stand_ins.processes import free_port

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
FOLDER = Path(__file__).parents[1] / "build" / "llama_cpp"
SOURCE = FOLDER / f"{PACKAGE.replace('-', '_')}-{VERSION}" / "vendor" / "llama.cpp"
SERVER, QUANTIZE = TOOLS = ("llama-server", "llama-quantize")
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_AMX_TILE=OFF",
    "-DGGML_AMX_INT8=OFF",
    "-DGGML_AMX_BF16=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DBUILD_SHARED_LIBS=OFF",
)


def build(instructions: str) -> Path | None:
    """The folder of the built programs; None where nothing here can build them.

    Args:
        instructions: "native", all that this processor has, or "avx2", what common ones have.
    """
    programs = FOLDER / f"{VERSION}-{instructions}" / "bin"
    if all((programs / tool).exists() for tool in TOOLS):
        return programs
    if not (shutil.which("cmake") and shutil.which("c++")):
        return None
    FOLDER.mkdir(parents=True, exist_ok=True)
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    _run([*download, f"--dest={FOLDER}", f"--no-binary={PACKAGE}", f"{PACKAGE}=={VERSION}"])
    with tarfile.open(SOURCE.parents[1].with_name(f"{SOURCE.parents[1].name}.tar.gz")) as archive:
        archive.extractall(FOLDER, filter="data")
    # Without it, llama.cpp's own choice is AVX2, FMA, F16C and BMI2.
    native = f"-DGGML_NATIVE={'ON' if instructions == 'native' else 'OFF'}"
    _run(["cmake", "-S", str(SOURCE), "-B", str(programs.parent), native, *OPTIONS])
    _run(["cmake", "--build", str(programs.parent), "--parallel", "2", "--target", *TOOLS])
    return programs


def write_models(programs: Path, model: Path, folder: Path) -> dict[str, Path]:
    """A model in 16 bits and in Q8_0, as llama.cpp's own programs write them."""
    files = {"16 bits": folder / "16_bits.gguf", "Q8_0": folder / "q8_0.gguf"}
    converter = [sys.executable, str(SOURCE / "convert_hf_to_gguf.py"), str(model)]
    _run([*converter, "--outtype", "f16", "--outfile", str(files["16 bits"])])
    _run([str(programs / QUANTIZE), str(files["16 bits"]), str(files["Q8_0"]), "Q8_0"])
    return files


@contextmanager
def serving(programs: Path, file: Path, clients: int, threads: int) -> Iterator[tuple[str, int]]:
    """A server with a place for each client while the block runs: its address and process id.

    It keeps no prompts for the next request, as the endpoint keeps none.
    """
    port = free_port()
    command = [str(programs / SERVER), "--model", str(file), "--port", str(port), "--offline"]
    command += ["--parallel", str(clients), "--ctx-size", str(512 * clients), "--no-cache-prompt"]
    command += ["--threads", str(threads), "--no-ui", "--log-disable"]
    server = subprocess.Popen(command, stdout=sys.stderr)
    try:
        url = f"http://127.0.0.1:{port}"
        while not _is_ready(url):
            if server.poll() is not None:
                raise RuntimeError(f"{' '.join(command)} ended with {server.returncode}")
            # Loading is timed with it, so it is asked often.
            time.sleep(0.05)
        yield url, server.pid
    finally:
        server.terminate()
        server.wait()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def _run(command: list[str]) -> None:
    """What goes wrong is told by the program itself."""
    subprocess.run(command, check=True, stdout=sys.stderr)
