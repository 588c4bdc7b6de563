"""Certificates: what was changed after signing is refused, and so is another's key."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
from click.testing import CliRunner
from securesystemslib.dsse import Envelope
from securesystemslib.signer import CryptoSigner

from artifacts.errors import UserError
from llm_assets.cli.main import commands
from llm_assets.forgetting.certificate import (
    PREDICATE_TYPE,
    open_signer,
    read_certificate,
    read_signed,
    sign,
)

STATEMENT = {"predicateType": "urn:test", "predicate": {"documents": ["a", "b"], "erased": True}}


@pytest.fixture
def signer(tmp_path: Path) -> CryptoSigner:
    return open_signer(tmp_path / "keys" / "issuer.pem")


@pytest.fixture
def certificate(tmp_path: Path, signer: CryptoSigner) -> Path:
    path = tmp_path / "certificate.json"
    path.write_bytes(sign(STATEMENT, signer))
    return path


def test_a_statement_is_read_as_it_was_signed(
    tmp_path: Path, certificate: Path, signer: CryptoSigner
) -> None:
    public = tmp_path / "keys" / "issuer.pub"
    for trusted in (None, public):
        assert read_signed(certificate, trusted) == (STATEMENT, signer.public_key.keyid)


def test_a_certificate_in_a_bucket_is_read_by_its_address(certificate: Path) -> None:
    place = "memory://store/certificate.json"
    fsspec.filesystem("memory").pipe(place, certificate.read_bytes())
    ended = CliRunner().invoke(commands, ["verify", place])
    assert f"{place} contains a statement of type urn:test" in str(ended.exception)


def test_a_certificate_of_a_newer_version_is_told_as_such(
    certificate: Path, signer: CryptoSigner
) -> None:
    statement = {"predicateType": PREDICATE_TYPE, "predicate": {"pipeline": "manual", "new": 1}}
    certificate.write_bytes(sign(statement, signer))
    with pytest.raises(UserError, match="states what this version of llm-assets does not know"):
        read_certificate(str(certificate))


def test_the_key_is_made_once_and_its_owner_alone_may_read_it(
    tmp_path: Path, signer: CryptoSigner
) -> None:
    path = tmp_path / "keys" / "issuer.pem"
    assert open_signer(path).public_key.keyid == signer.public_key.keyid
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text("no key")
    with pytest.raises(UserError, match=r"issuer\.pem is no private key in PEM"):
        open_signer(path)


def test_two_that_sign_at_once_for_the_first_time_have_one_key(tmp_path: Path) -> None:
    """The first certificate would be signed by a key that nobody has any more."""
    path = tmp_path / "keys" / "issuer.pem"
    with ThreadPoolExecutor(8) as pool:
        signers = list(pool.map(open_signer, [path] * 8))
    assert len({signer.public_key.keyid for signer in signers}) == 1
    path.write_text("")
    assert open_signer(path).public_key.keyid, "as a full disk left it"


def test_a_key_of_a_place_where_nothing_can_be_written_signs(
    tmp_path: Path, signer: CryptoSigner
) -> None:
    with (tmp_path / "keys" / "issuer.pem").open() as file:
        opened = open_signer(Path(f"/dev/fd/{file.fileno()}"))
    assert opened.public_key.keyid == signer.public_key.keyid


def test_no_flipped_bit_changes_what_is_read(certificate: Path) -> None:
    whole = certificate.read_bytes()
    generator, refused = random.Random(0), 0
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << generator.randrange(8)
        certificate.write_bytes(changed)
        try:
            # Unused bits of base64, and white space, say nothing.
            assert read_signed(certificate, None)[0] == STATEMENT
        except UserError:
            refused += 1
    assert refused > 0.8 * len(whole)


def test_another_key_and_another_statement_are_refused(
    tmp_path: Path, certificate: Path, signer: CryptoSigner
) -> None:
    open_signer(tmp_path / "other.pem")
    with pytest.raises(UserError, match="is not signed with the key"):
        read_signed(certificate, tmp_path / "other.pub")
    forged = json.loads(certificate.read_text())
    payload = json.dumps(STATEMENT | {"predicate": {}}).encode()
    forged["payload"] = Envelope(payload, "", {}).to_dict()["payload"]
    certificate.write_text(json.dumps(forged))
    with pytest.raises(UserError, match="was changed after it was signed"):
        read_signed(certificate, None)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"payload": 1}'])
def test_what_is_no_certificate_is_refused_in_one_line(certificate: Path, content: bytes) -> None:
    certificate.write_bytes(content)
    with pytest.raises(UserError, match="is no certificate, or was changed"):
        read_signed(certificate, None)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing\.json cannot be read"):
        read_signed(tmp_path / "missing.json", None)
