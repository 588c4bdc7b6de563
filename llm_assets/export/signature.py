"""A signature over all files of an exported model, as the OpenSSF's model signing has it.

model-signing 1.1.1 writes and checks it: the SHA-256 of each file in an in-toto statement, in a
Sigstore bundle, by a plain elliptic-curve key, so nothing is asked of a network. Its own command
checks it too: `model_signing verify key FOLDER --signature FOLDER/model.sig --public_key KEY`.
"""

from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    load_pem_private_key,
    load_pem_public_key,
)

from artifacts.errors import UserError
from artifacts.shown import shown_in_line
from llm_assets.signing_keys import write_key_pair

SIGNATURE_NAME = "model.sig"
_CURVES = ("secp256r1", "secp384r1", "secp521r1")


def prepare_key(path: Path) -> None:
    """See that a file has a key to sign with; one that is absent is made.

    Raises:
        UserError: the file holds no key of this kind.
    """
    if not path.exists():
        write_key_pair(path, ec.generate_private_key(ec.SECP256R1()))
        return
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError(f"{path} is no private key in PEM without a password: {error}.") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name not in _CURVES:
        raise UserError(
            f"{path} is a private key of another kind. Models are signed with one on the curves "
            "P-256, P-384 or P-521; name a file that is not there, and one is made."
        )


def sign_folder(folder: Path, key: Path) -> None:
    """Write the signature of all that is in a folder into it."""
    from model_signing.signing import Config

    config = Config().set_hashing_config(_all_but_the_signature(folder))
    config.use_elliptic_key_signer(private_key=key).sign(folder, folder / SIGNATURE_NAME)


def check_signature(folder: Path, key: Path) -> int:
    """Compare a folder with its signature.

    Args:
        key: the public key in PEM.

    Returns:
        How many files it was made over.

    Raises:
        UserError: there is none, another key made it, or a file was changed, added or removed.
    """
    from model_signing.verifying import Config

    path = folder / SIGNATURE_NAME
    if not path.is_file():
        raise UserError(
            f"{folder} has no signature ({SIGNATURE_NAME}). Write it again with: "
            "llm-assets export VERSION --to FORM --sign KEY"
        )
    try:
        loaded = load_pem_public_key(key.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise UserError(f"{key} is no public key in PEM: {error}.") from None
    if not isinstance(loaded, ec.EllipticCurvePublicKey):
        raise UserError(f"{key} is a public key of another kind than models are signed with.")
    try:
        config = Config().set_hashing_config(_all_but_the_signature(folder))
        config.use_elliptic_key_verifier(public_key=key).verify(folder, path)
    except InvalidSignature:
        raise _changed(folder, key, "the signature is another key's, or was changed") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise _changed(folder, key, str(error)) from None
    return sum(one.is_file() for one in folder.rglob("*")) - 1


def _all_but_the_signature(folder: Path) -> Any:
    from model_signing.hashing import Config

    return Config().set_ignored_paths(paths=[folder / SIGNATURE_NAME], ignore_git_paths=False)


def _changed(folder: Path, key: Path, fault: str) -> UserError:
    return UserError(
        f"{folder} is not as it was signed with the key of {key}: {shown_in_line(fault)}. Do not "
        "use it: ask its issuer for it again."
    )
