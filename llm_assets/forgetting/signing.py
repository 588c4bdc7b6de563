"""Signs statements and checks signatures: DSSE envelopes with an ed25519 key.

securesystemslib reads, writes and verifies the envelopes, as it does for TUF and in-toto; any
program that knows DSSE can check a certificate without this project.
"""

import json
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
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

PAYLOAD_TYPE = "application/vnd.in-toto+json"


def open_signer(path: Path) -> CryptoSigner:
    """The key in a file, which is created with the public key beside it if there is none.

    Raises:
        UserError: the file holds no ed25519 key.
    """
    if path.exists():
        try:
            return CryptoSigner(load_pem_private_key(path.read_bytes(), None))
        except (ValueError, TypeError) as error:
            raise UserError(
                f"{path} is no private key in PEM without a password: {error}. Give one with "
                "`forgetting.signing_key`, or move this file away: a new key is then created."
            ) from None
    signer = CryptoSigner.generate_ed25519()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Readable only by its owner before there is anything in it.
    path.touch(0o600, exist_ok=False)
    path.write_bytes(signer.private_bytes)
    path.with_suffix(".pub").write_bytes(_public_key(signer))
    return signer


def sign(statement: dict[str, Any], signer: CryptoSigner) -> bytes:
    """The envelope as JSON; under `publicKey` the key that verifies it, in PEM."""
    envelope = Envelope(json.dumps(statement, sort_keys=True).encode(), PAYLOAD_TYPE, {})
    envelope.sign(signer)
    public = _public_key(signer).decode()
    return json.dumps(envelope.to_dict() | {"publicKey": public}, indent=2).encode()


def _public_key(signer: CryptoSigner) -> bytes:
    """In PEM, which other programs read; securesystemslib itself writes bare hexadecimal."""
    public = load_pem_private_key(signer.private_bytes, None).public_key()
    return public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def read_signed(path: Path | str, trusted: Path | None = None) -> tuple[dict[str, Any], str]:
    """The statement of an envelope, and the id of the key that signed it.

    Args:
        path: of the file, or its URL.
        trusted: a public key in PEM; without one, the envelope's own is used, which shows that
        nothing
            was changed, but not who signed.

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
        key = SSlibKey.from_crypto(load_pem_public_key(pem))
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
        raise UserError(f"{path} is a signed {envelope.payload_type}, not a {PAYLOAD_TYPE}.")
    statement: dict[str, Any] = json.loads(envelope.payload)
    return statement, key.keyid
