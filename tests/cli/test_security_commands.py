"""`pdserve certs` and `pdserve key`: the processes accept what they write."""

import ssl
import stat
from base64 import b64decode
from collections.abc import Iterator
from copy import deepcopy
from datetime import timedelta
from pathlib import Path

import pytest
from fakes.kubernetes import FakeKubernetes, in_pod

from pdserve.cli.main import main
from pdserve.services.common.auth import certificates
from pdserve.services.common.auth.access import TlsAccess
from pdserve.services.common.auth.certificates import (
    Identity,
    Role,
    issue,
    make_authority,
    role_in,
)
from pdserve.services.common.tenants import ApiKeys


def test_certificates_of_every_role(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "pem"
    assert main(["certs", str(folder)]) == 0
    assert "ca-key.pem; keep it secret" in capsys.readouterr().err
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


def test_only_missing_certificates_are_created(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["certs", str(tmp_path), "--keep-existing"]) == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert main(["certs", str(tmp_path), "--keep-existing"]) == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "router.pem").unlink()
    assert main(["certs", str(tmp_path), "--keep-existing"]) == 0
    changed = {n for n, content in before.items() if (tmp_path / n).read_bytes() != content}
    assert changed == {"router.pem", "router-key.pem"}
    (tmp_path / "router.pem").unlink()
    (tmp_path / "ca.pem").unlink()
    capsys.readouterr()
    assert main(["certs", str(tmp_path), "--keep-existing"]) == 1
    assert "ca-key.pem is missing" in capsys.readouterr().err
    assert not (tmp_path / "ca.pem").exists()


def test_certificates_that_end_soon_or_do_not_verify_are_replaced(
    tmp_path: Path, subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["certs", str(tmp_path)]) == 0
    own = Identity((tmp_path / "ca.pem").read_bytes(), (tmp_path / "ca-key.pem").read_bytes())
    router, other = issue(own, Role.ROUTER), issue(own, Role.ROUTER)
    with monkeypatch.context() as patch:
        patch.setattr(certificates, "EARLIER", timedelta(days=300))
        valid = issue(own, Role.ROUTER, 160)
        ending = issue(own, Role.ROUTER, 140)
        expired = issue(own, Role.ROUTER, -1)
    for what, identity, kept in (
        ("valid", valid, True),
        ("in its last third", ending, False),
        ("expired", expired, False),
        ("of another authority", issue(make_authority(), Role.ROUTER), False),
        ("of another role", issue(own, Role.DECODE), False),
        ("of another key", Identity(router.certificate, other.key), False),
        ("no certificate", Identity(b"-", router.key), False),
    ):
        with subtests.test(what):
            (tmp_path / "router.pem").write_bytes(identity.certificate)
            (tmp_path / "router-key.pem").write_bytes(identity.key)
            before = {path: path.read_bytes() for path in tmp_path.iterdir()}
            assert main(["certs", str(tmp_path), "--keep-existing"]) == 0
            changed = {path.name for path in before if path.read_bytes() != before[path]}
            assert changed == (set() if kept else {"router.pem", "router-key.pem"})
            TlsAccess(*(str(tmp_path / f"{n}.pem") for n in ("ca", "router", "router-key")))


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKubernetes]:
    with in_pod(tmp_path, monkeypatch) as server:
        yield server


def test_certificates_as_secrets(api: FakeKubernetes) -> None:
    command = ["certs", "kubernetes:///pd", "--keep-existing"]
    assert main(command) == 0
    assert set(api.secrets) == {"pd-ca", *(f"pd-{role}" for role in Role)}
    authority = api.secrets["pd-ca"]["data"]["tls.crt"]
    for role in Role:
        secret = api.secrets[f"pd-{role}"]
        assert secret["type"] == "kubernetes.io/tls"
        assert role_in(b64decode(secret["data"]["tls.crt"])) is role
        assert secret["data"]["ca.crt"] == authority
    before = deepcopy(api.secrets)
    del api.secrets["pd-decode"]
    assert main(command) == 0
    assert {n for n, secret in before.items() if api.secrets[n] != secret} == {"pd-decode"}
    assert main(command[:2]) == 0
    assert {n for n, secret in before.items() if api.secrets[n] == secret} == {"pd-ca"}


def test_secrets_that_cannot_be_written(
    api: FakeKubernetes, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    api.secrets["half-ca"] = {"data": {"tls.crt": ""}}
    refused = [(403, {})]
    for target, answers, code, said in (
        (
            "kubernetes:///pd",
            refused,
            1,
            "scripted status 403; the pod's service account needs",
        ),
        ("kubernetes:///half", [], 1, "Secret half-ca has no tls.key"),
        ("kubernetes://pd", [], 2, "is not kubernetes:///PREFIX"),
        ("kubernetes:///Pd", [], 2, "is not kubernetes:///PREFIX"),
    ):
        with subtests.test(target):
            api.answers.extend(answers)
            assert main(["certs", target]) == code
            assert said in capsys.readouterr().err
    api.stop()
    assert main(["certs", "kubernetes:///pd"]) == 1
    assert "cannot reach the Kubernetes API server" in capsys.readouterr().err
    api.start()


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
