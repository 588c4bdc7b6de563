"""An exported model's signature: the library's own command reads it, and no change passes."""

import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from artifacts.errors import UserError
from llm_assets.export.export import export_model
from llm_assets.export.signature import SIGNATURE_NAME, check_signature, prepare_key, sign_folder
from llm_assets.signing_keys import write_key_pair


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "keys" / "release.pem"
    prepare_key(path)
    return path


@pytest.fixture
def folder(tmp_path: Path, key: Path) -> Path:
    """A signed folder of two files."""
    made = tmp_path / "manuals-3"
    (made / "inner").mkdir(parents=True)
    (made / "config.json").write_text("{}")
    (made / "inner" / "weights.bin").write_bytes(bytes(range(256)))
    sign_folder(made, key)
    return made


def test_the_key_is_made_once_and_its_owner_alone_may_read_it(key: Path) -> None:
    before = key.read_bytes()
    prepare_key(key)
    assert key.read_bytes() == before and key.stat().st_mode & 0o777 == 0o600


def test_what_was_signed_holds_here_and_by_the_librarys_own_command(
    folder: Path, key: Path
) -> None:
    public = key.with_suffix(".pub")
    assert check_signature(folder, public) == 2
    options = ["--signature", str(folder / SIGNATURE_NAME), "--public_key", str(public)]
    command = [sys.executable, "-m", "model_signing", "verify", "key", str(folder), *options]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0 and "succeeded" in ended.stdout, ended


@pytest.mark.parametrize(
    "path", ["config.json", "inner/weights.bin", "added.txt", ".gitattributes"]
)
def test_a_file_that_was_changed_or_added_is_named(folder: Path, key: Path, path: str) -> None:
    with (folder / path).open("ab") as file:
        file.write(b" ")
    with pytest.raises(UserError, match=rf"is not as it was signed .*{path}.*Do not use it"):
        check_signature(folder, key.with_suffix(".pub"))


def test_a_file_that_is_gone_is_named(folder: Path, key: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"is not as it was signed .*config\.json"):
        check_signature(folder, key.with_suffix(".pub"))


def test_another_key_a_changed_signature_and_none_are_refused(
    folder: Path, key: Path, tmp_path: Path
) -> None:
    public, signature = key.with_suffix(".pub"), folder / SIGNATURE_NAME
    prepare_key(tmp_path / "other.pem")
    with pytest.raises(UserError, match="is not as it was signed"):
        check_signature(folder, tmp_path / "other.pub")
    whole = signature.read_text()
    for changed in (whole[:-9], "{}", "[]", "", whole.replace('"payload":"', '"payload":"e30')):
        signature.write_text(changed)
        with pytest.raises(UserError, match="is not as it was signed"):
            check_signature(folder, public)
    signature.write_text(whole)
    for other in (tmp_path / "absent.pub", folder, signature):
        with pytest.raises(UserError, match="is no public key in PEM"):
            check_signature(folder, other)
    signature.unlink()
    with pytest.raises(UserError, match="has no signature"):
        check_signature(folder, public)


def test_a_key_of_another_kind_is_refused_before_anything_is_written(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    write_key_pair(tmp_path / "issuer.pem", Ed25519PrivateKey.generate())
    (tmp_path / "none.pem").write_text("no key")
    for name, said in (("issuer", "of another kind"), ("none", "no private key in PEM")):
        with pytest.raises(UserError, match=said):
            export_model(
                tiny_model_folder, "safetensors", tmp_path / "out", "m", tmp_path / f"{name}.pem"
            )
    assert not (tmp_path / "out").exists()


def test_an_export_is_signed_before_it_appears(tiny_model_folder: Path, tmp_path: Path) -> None:
    key = tmp_path / "release.pem"
    export_model(tiny_model_folder, "safetensors", tmp_path / "out", "m", key)
    assert check_signature(tmp_path / "out", tmp_path / "release.pub") > 3
