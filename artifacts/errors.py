"""Errors that a user can act on, and the commands that their messages advise.

What is quoted is made fit for a terminal: nothing in untrusted text reaches it as a command. Where
a module is not installed, the extra of llm-assets that brings it is named. The reason behind an
error that nobody foresaw is in `artifacts.reasons`.
"""

import importlib.metadata
import importlib.util
import os
import re
from contextlib import suppress
from pathlib import Path
from shlex import quote

_UNSAFE = re.compile(
    # Control characters but the line feed and tab, marks that turn the direction of writing, and
    # surrogates, which no terminal or file takes.
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_BREAKS = re.compile("[\t\n]")


HUB_ADVICE = (
    "If it is gated or private, accept its terms there and give a token in HF_TOKEN, or on Google "
    "Cloud in the secret that `secrets.hugging_face_token` names; if the Hub is busy, try again "
    "later."
)
"""What to do where the Hugging Face Hub gives nothing."""


def shown(text: str) -> str:
    r"""Text of several lines with its control characters written out: `\x1b[31m`, `\u202e`."""
    return _UNSAFE.sub(_escape, text)


def shown_in_line(text: str) -> str:
    r"""The same for what belongs on one line, such as an id or a path: breaks become `\n`."""
    return _BREAKS.sub(_escape, shown(text))


def has_control_characters(text: str) -> bool:
    """Whether `shown_in_line` would change the text."""
    return bool(_UNSAFE.search(text) or _BREAKS.search(text))


def _escape(match: re.Match[str]) -> str:
    return match.group().encode("unicode_escape").decode()


_DISTRIBUTIONS = {
    "awkward": "gigatoken",
    "docx": "python-docx",
    "fasttext": "fasttext-numpy2-wheel",
    "google": "google-cloud-storage",
    "google_crc32c": "google-cloud-storage",
    "huggingface_hub": "transformers",
    "openvino_tokenizers": "openvino-genai",
    "psycopg2": "dagster-postgres",
    "py4j": "pyspark",
    "pynvml": "nvidia-ml-py",
    "ruamel": "ruamel-yaml",
}
"""Of a top-level module the distribution that brings it, where their names differ."""


def extra_of(module: str) -> str | None:
    """The first extra whose distributions bring the module, as pyproject.toml lists them.

    None where none does, or where llm-assets itself is not installed as a distribution.
    """
    name = module.partition(".")[0]
    # Names of distributions mean the same in upper and lower case, and with `_` as with `-`.
    distribution = _DISTRIBUTIONS.get(name, name).replace("_", "-").lower()
    try:
        requirements = importlib.metadata.requires("llm-assets") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for requirement in requirements:
        # Such a line of the metadata is `NAME>=VERSION; extra == "EXTRA"`.
        extra = re.match(r"""([\w.-]+).*;.*\bextra == ["']([\w-]+)["']""", requirement)
        if extra and extra[1].replace("_", "-").lower() == distribution:
            return extra[2]
    return None


def pip_command() -> str:
    """The program that installs packages here: `uv venv` makes environments without pip."""
    return "pip" if importlib.util.find_spec("pip") else "uv pip"


def install_advice(module: str) -> str | None:
    """What to install where the module is absent, in a sentence; None where no extra brings it."""
    extra = extra_of(module)
    return extra and (
        f"This needs {module}, which is not installed here. Install the extra that brings it: "
        f"{pip_command()} install 'llm-assets[{extra}]'"
    )


CONFIG_VARIABLE, PREFIX_VARIABLE = "LLM_ASSETS_CONFIG", "LLM_ASSETS_KEY_PREFIX"
"""The pipeline file in force, and the prefix of its asset keys; programs that it starts inherit
both."""


class UserError(Exception):
    """A fault in what the user gave: a setting, a file, a missing input.

    The message names the file, key or row, says what was expected and what to do next. Entry points
    print it alone, without a traceback.
    """


class MissingArtifact(UserError):
    """An input artifact does not exist yet, or no longer."""


class LeaseLost(UserError):
    """Another maker has taken over; what this one made is not committed.

    Raised where this machine was asleep or cut off for longer than the lease lasts. Asking again
    finds what the other made.
    """

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} That happens where this machine was asleep, or cut off from the store, for "
            "too long. Nothing of its work was entered. Run the same command again: what exists by "
            "then is used."
        )


class DamagedArtifact(UserError):
    """A file of an artifact has another size or checksum than its manifest says."""


OF_ONE_REQUEST = re.compile(
    r"\s*\((?:Request ID|Amzn Trace ID|Amz CF ID): [^)\n]*\)"
    r"|\s*Job ID: \S+"
)
"""What errors of the Hub and of BigQuery say of one request alone. Without it, an error that
repeats reads the same each time, and is reported once."""


def first_line(error: BaseException) -> str:
    """What an error says, in one line of at most 300 characters; its name where it says nothing."""
    # The first line of the Hub's rate-limit error has nothing but the request's id.
    message = OF_ONE_REQUEST.sub("", str(error)).strip()
    return (message or type(error).__name__).splitlines()[0][:300]


def make_command(asset: str) -> str:
    """The shell line that makes an asset and whatever before it does not exist."""
    return materialize_command(f"*{asset}")


def materialize_command(*selected: str) -> str:
    """The shell line that materializes assets, an asterisk before a name meaning all before it.

    Asset keys have the prefix that PREFIX_VARIABLE names, as they have in the pipeline in force.
    """
    prefix = os.environ.get(PREFIX_VARIABLE)
    before = f"{prefix}/" if prefix else ""
    keys = ",".join(re.sub(r"^(\*?)", rf"\1{before}", name) for name in selected)
    command = f'dagster asset materialize --select "{keys}"'
    with suppress(OSError, UnicodeDecodeError):
        # In a project that `llm-assets init` made, that file says where the definitions are.
        if "DAGSTER_MODULE_NAME=llm_assets" in Path("env.sh").read_text():
            config = os.environ.get(CONFIG_VARIABLE)
            assignment = f"{CONFIG_VARIABLE}={quote(config)} " if config else ""
            # In a shell of its own, so that the user's keeps what it has.
            return f"(. ./env.sh && {assignment}{command})"
    return command


def mend_command(folder: str) -> str:
    """The shell line that sets a damaged artifact aside and makes it again from its inputs, by its
    folder `.../<kind>/<fingerprint>` in any store."""
    kind, fingerprint = folder.rstrip("/").split("/")[-2:]
    return f"llm-assets doctor --repair {kind}/{fingerprint} && {make_command(kind)}"
