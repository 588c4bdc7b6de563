"""Signed statements: in-toto's format in a DSSE envelope, by a plain ed25519 key.

securesystemslib reads, writes and verifies them, as it does for TUF and in-toto; any program that
knows DSSE can check a certificate without this project.
"""

import json
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import Error as SigningError
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer import CryptoSigner, SSlibKey

from artifacts.errors import UserError
from artifacts.storage import files
from llm_assets.signing_keys import write_key_pair

PAYLOAD_TYPE = "application/vnd.in-toto+json"


def open_signer(path: Path) -> CryptoSigner:
    """The key of a file, which is made where there is none; beside it lies the public one.

    Raises:
        UserError: the file holds no ed25519 key.
    """
    if path.exists():
        try:
            return CryptoSigner(load_pem_private_key(path.read_bytes(), None))
        except (ValueError, TypeError) as error:
            raise UserError(
                f"{path} is no private key in PEM without a password: {error}. Give one with "
                "`forgetting.signing_key`, or move this file away: a new key is made then."
            ) from None
    key = Ed25519PrivateKey.generate()
    write_key_pair(path, key)
    return CryptoSigner(key)


def _public_key(signer: CryptoSigner) -> str:
    """In PEM, as other programs read it; securesystemslib itself writes bare hexadecimal."""
    key = load_pem_private_key(signer.private_bytes, None).public_key()
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def sign(statement: dict[str, Any], signer: CryptoSigner) -> bytes:
    """The envelope as JSON; under `publicKey` the key that verifies it, in PEM."""
    envelope = Envelope(json.dumps(statement, sort_keys=True).encode(), PAYLOAD_TYPE, {})
    envelope.sign(signer)
    public = {"publicKey": _public_key(signer)}
    return json.dumps(envelope.to_dict() | public, indent=2).encode()


def read_signed(path: Path, trusted: Path | None) -> tuple[dict[str, Any], str]:
    """The statement of an envelope, and the id of the key that signed it.

    Args:
        trusted: a public key in PEM; without one, the envelope's own is taken, which shows that
            nothing was changed, and not who signed.

    Raises:
        UserError: it cannot be read, was changed, or another key signed it.
    """
    try:
        content = json.loads(files.read(path))
        pem = trusted.read_bytes() if trusted else str(content["publicKey"]).encode()
        envelope = Envelope.from_dict(content)
    except OSError as error:
        raise UserError(f"{error.filename or path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError, SigningError) as error:
        raise UserError(f"{path} is no certificate, or was changed: {error}.") from None
    try:
        loaded = load_pem_public_key(pem)
        key = SSlibKey.from_crypto(loaded)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError(f"{trusted or path} has no public key in PEM: {error}.") from None
    try:
        envelope.verify([key], threshold=1)
    except VerificationError:
        signed_by = ", ".join(envelope.signatures) or "nobody"
        raise UserError(
            f"{path} was changed after it was signed, or is not signed with the key {key.keyid} "
            f"(by {signed_by}). Do not rely on it: ask its issuer for it again."
        ) from None
    if envelope.payload_type != PAYLOAD_TYPE:
        raise UserError(f"{path} is a signed {envelope.payload_type}, not a statement.")
    statement: dict[str, Any] = json.loads(envelope.payload)
    return statement, key.keyid
