"""Files with the keys that certificates and exported models are signed with."""

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

_PRIVATE = 0o600


def write_key_pair(path: Path, key: Ed25519PrivateKey | EllipticCurvePrivateKey) -> None:
    """Write a key in PEM for its owner alone, and beside it the public one, with the ending `.pub`.

    Raises:
        FileExistsError: there is a file of this name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(_PRIVATE, exist_ok=False)
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public = key.public_key()
    path.with_suffix(".pub").write_bytes(
        public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
