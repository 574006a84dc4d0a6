"""k8s/pin.py: a release without digests is not rendered."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from builders.manifests import NO_KUBECTL, SOURCES, Workload, parsed, workloads

CONTROL = f"localhost:5000/team/pdserve-control@sha256:{'c' * 64}"
WORKER = f"localhost:5000/team/pdserve-worker@sha256:{'d' * 64}"


def pin(folder: Path, *references: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(folder / "pin.py"), *references]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of k8s/ as it is checked out."""
    copied = tmp_path / "k8s"
    shutil.copytree(SOURCES, copied, ignore=shutil.ignore_patterns("images"))
    return copied


def test_digests_are_written_where_the_release_reads_them(folder: Path) -> None:
    done = pin(folder, WORKER, CONTROL)
    assert (done.returncode, done.stderr) == (0, "")
    component = yaml.safe_load((folder / "overlays/release/images/kustomization.yaml").read_text())
    assert component["images"] == [
        {
            "name": f"pdserve-{name}",
            "newName": f"localhost:5000/team/pdserve-{name}",
            "digest": f"sha256:{letter * 64}",
        }
        for name, letter in (("control", "c"), ("worker", "d"))
    ]


def test_an_invalid_digest_is_named_in_the_error(subtests: pytest.Subtests, folder: Path) -> None:
    for references, said in (
        ([CONTROL], "no reference of pdserve-worker"),
        ([CONTROL, CONTROL], "one each of"),
        ([CONTROL, "localhost:5000/team/pdserve-worker:1.2"], "is not REPOSITORY@sha256:DIGEST"),
        ([CONTROL, WORKER.replace("worker", "worker:1.2")], "is not REPOSITORY@sha256:DIGEST"),
        ([CONTROL, WORKER[:-1]], "is not REPOSITORY@sha256:DIGEST"),
        ([CONTROL, WORKER.replace("worker", "other")], "one each of"),
    ):
        with subtests.test(said):
            done = pin(folder, *references)
            assert done.returncode == 2
            assert said in done.stderr
            assert not (folder / "overlays/release/images").exists()


def test_a_release_without_digests_is_not_rendered(folder: Path) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip(NO_KUBECTL)
    command = [kubectl, "kustomize", str(folder / "overlays/release")]
    assert b"images" in subprocess.run(command, capture_output=True).stderr
    pin(folder, CONTROL, WORKER)
    assert CONTROL in subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(shutil.which("kubectl") is None, reason=NO_KUBECTL)
@pytest.mark.parametrize("overlay", ["cpu", "two-pools/pool-b"])
def test_another_overlay_can_use_the_digests(folder: Path, overlay: str) -> None:
    """Includes an overlay without the model's Job."""
    pin(folder, CONTROL, WORKER)
    path = folder / f"overlays/{overlay}/kustomization.yaml"
    wanted = yaml.safe_load(path.read_text())
    wanted["components"].append("../" * overlay.count("/") + "../release/images")
    path.write_text(yaml.safe_dump(wanted))
    done = subprocess.run(["kubectl", "kustomize", path.parent], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = workloads(parsed(done.stdout))
    images = {c["image"] for workload in found for c in workload.every_container}
    assert images == ({CONTROL, WORKER} if overlay == "cpu" else {WORKER})


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def job(folder: Path) -> Workload:
    """Return the Job of the overlay `release` in its current state."""
    command = ["kubectl", "kustomize", str(folder / "overlays/release")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (found,) = [w for w in workloads(parsed(done.stdout)) if w.kind == "Job"]
    return found


@pytest.mark.skipif(shutil.which("kubectl") is None, reason=NO_KUBECTL)
def test_another_release_has_another_job_name(folder: Path) -> None:
    """A Job's pod template is immutable, so applying a changed Job under the same name would fail.
    A change of the model, made with the patch from the head of the component's file, also gives
    another name."""
    pin(folder, CONTROL, WORKER)
    first = job(folder)
    assert job(folder) == first
    pin(folder, CONTROL, WORKER.replace("d" * 64, "e" * 64))
    second = job(folder)
    overlay = folder / "overlays/release/kustomization.yaml"
    head = (folder / "components/model-volume/kustomization.yaml").read_text()
    (patch,) = re.findall(r"^#   (patches:\n(?:#    .*\n)+)", head, re.MULTILINE)
    patch = patch.replace("\n#   ", "\n").replace("COMMIT", COMMIT)
    overlay.write_text(overlay.read_text() + patch)
    third = job(folder)
    script = folder / "components/model-volume/pool/model_volume.py"
    script.write_text(script.read_text() + "# changed\n")
    made = [first, second, third, job(folder)]
    assert len({workload.name for workload in made}) == len({str(w.template) for w in made}) == 4
    assert all(w.name.startswith("pdserve-model-") and len(w.name) <= 63 for w in made)
