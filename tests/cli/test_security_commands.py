"""`pdserve certs` and `pdserve key`: the processes accept what they write."""

import ssl
import stat
from pathlib import Path

import pytest

from pdserve.cli.main import main
from pdserve.services.common.auth.access import TlsAccess
from pdserve.services.common.auth.certificates import Role, role_in
from pdserve.services.common.tenants import ApiKeys


def test_certificates_of_every_role(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "pem"
    assert main(["certs", str(folder)]) == 0
    assert "Keep ca-key.pem secret" in capsys.readouterr().err
    for role in Role:
        certificate, key = folder / f"{role}.pem", folder / f"{role}-key.pem"
        assert role_in(certificate.read_bytes()) is role
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        TlsAccess(str(folder / "ca.pem"), str(certificate), str(key))
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(certificate, key)


def test_an_invalid_certificate_stops_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["certs", str(tmp_path)]) == 0

    def start(role: str, key: str) -> str:
        own = ["--cluster-cert", f"{tmp_path}/decode.pem", "--cluster-key", f"{tmp_path}/{key}.pem"]
        assert main([role, "--cluster-ca", f"{tmp_path}/ca.pem", *own]) == 2
        return capsys.readouterr().err

    assert "--cluster-cert has the role decode, but this is a router" in start(
        "router", "decode-key"
    )
    assert "decode.pem: the key does not match the certificate" in start("router", "router-key")


def test_certificates_renewed_by_the_same_authority(tmp_path: Path) -> None:
    assert main(["certs", str(tmp_path)]) == 0
    names = ("ca.pem", "ca-key.pem", "router.pem", "router-key.pem")
    before = {name: (tmp_path / name).read_bytes() for name in names}
    assert main(["certs", str(tmp_path)]) == 0
    kept = [name for name in names if (tmp_path / name).read_bytes() == before[name]]
    assert kept == ["ca.pem", "ca-key.pem"]


def test_a_broken_authority_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certs", str(tmp_path)]) == 0
    (tmp_path / "ca-key.pem").write_text("no key")
    assert main(["certs", str(tmp_path)]) == 2
    assert "ca-key.pem" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["certs", str(tmp_path / "file")]) == 2


def test_key_prints_a_line_for_the_key_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["key", "someone"]) == 0
    said = capsys.readouterr()
    line = next(text for text in said.out.splitlines() if text.startswith("someone:sha256:"))
    key = next(word for text in (said.out, said.err) for word in text.split() if word[:3] == "sk-")
    path = tmp_path / "keys"
    path.write_text(line + "\n")
    tenant = ApiKeys(file=str(path)).tenant(f"Bearer {key}")
    assert tenant is not None
    assert tenant.name == "someone"
    assert main(["key", "some one"]) == 2
