"""A certificate authority, a server certificate and a service-account key, all made up."""

import datetime
import ipaddress
import json
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

SERVICE_ACCOUNT = "runner@local-project.iam.gserviceaccount.com"
"""Who runs Dagster, and calls from this process."""
JOBS_ACCOUNT = "llm-assets@local-project.iam.gserviceaccount.com"
SERVING_ACCOUNT = "llm-assets-serving@local-project.iam.gserviceaccount.com"


@dataclass(frozen=True)
class Certificates:
    """PEM bytes of a test authority and of a certificate it signed for `localhost`."""

    authority: bytes
    server: bytes
    server_key: bytes


def _private_key(bits: int = 2048) -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=bits)


def _pem(key: rsa.RSAPrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def make_certificates() -> Certificates:
    """A new authority and a certificate for `localhost` and 127.0.0.1, valid for one day."""
    now = datetime.datetime.now(datetime.UTC)
    authority_key, server_key = _private_key(), _private_key()

    def build(subject: str, public_key: rsa.RSAPublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(_name(subject))
            .issuer_name(_name("Local test authority"))
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )

    # Without these, Python 3.13 trusts neither.
    may_sign = x509.KeyUsage(False, False, False, False, False, True, False, False, False)
    signed_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    authority = (
        build("Local test authority", authority_key.public_key())
        .add_extension(may_sign, critical=True)
        .add_extension(
            x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    alternatives = x509.SubjectAlternativeName(
        [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    )
    server = (
        build("localhost", server_key.public_key())
        .add_extension(alternatives, critical=False)
        .add_extension(signed_by, critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    return Certificates(
        authority.public_bytes(encoding), server.public_bytes(encoding), _pem(server_key)
    )


class ServiceAccountKey:
    """A service-account key file, and the public half that checks what it signed."""

    def __init__(self, path: Path, project: str, token_uri: str, account: str) -> None:
        # Each client looks for the primes of the key that it reads, for long where they are large.
        key = _private_key(bits=1024)
        self.path, self.account = path, account
        self.public_pem = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        content = {
            "type": "service_account",
            "project_id": project,
            "private_key_id": "1",
            "private_key": _pem(key).decode(),
            "client_email": account,
            "client_id": "1",
            "token_uri": token_uri,
        }
        path.write_text(json.dumps(content))
