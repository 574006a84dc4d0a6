"""A Docker engine for the tests: its daemon, base image and compose project, gone at the end.

It uses no engine that may run on the machine. `missing()` says what a machine lacks for it.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from systems.eventually import wait_until

BUILD_IMAGE = "pdserve-test-python:build"  # for the build stages of the Dockerfile
PYTHON_IMAGE = "pdserve-test-python:run"  # base of its images: nothing except Python
PACKAGES = {
    BUILD_IMAGE: "python3,python3-dev,python3-venv,python3-pip,ca-certificates",
    PYTHON_IMAGE: "python3,ca-certificates",
}
# Docker's own slim images have none of these.
NOT_SLIM = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "var/cache/apt",
    "var/lib/apt/lists",
)
PROXY_IMAGE = "haproxy:3.0-alpine"
START_S = 60.0
DAEMON_FLAGS = ("--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false")
PIP_KEYS = ("index-url", "extra-index-url", "trusted-host", "find-links")


def missing() -> str:
    """Return why no engine can be started here; empty if one can."""
    if os.geteuid() != 0:
        return "a Docker engine can only be started by root"
    for program, package in (
        ("dockerd", "docker.io"),
        ("docker", "docker.io"),
        ("debootstrap", "debootstrap"),
    ):
        if not shutil.which(program):
            return f"{program} is not installed (Debian: apt-get install {package})"
    return "" if compose_binary() else "docker-compose is not installed (make test-compose does it)"


def compose_binary() -> Path | None:
    """Return docker-compose, from beside this Python or from the path."""
    beside = Path(sys.executable).with_name("docker-compose")
    found = str(beside) if beside.exists() else shutil.which("docker-compose")
    return Path(found) if found else None


class DockerEngine:
    """Commands against a running daemon; `run` raises CalledProcessError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.host = f"unix://{folder}/docker.sock"

    def run(self, *words: str, env: dict[str, str] | None = None, timeout_s: float = 60) -> str:
        """Return the standard output of `docker WORDS`; both outputs go to the test's log if it
        fails.
        """
        full = {
            **os.environ,
            "DOCKER_HOST": self.host,
            "DOCKER_CONFIG": str(self._folder / "config"),
            **(env or {}),
        }
        done = subprocess.run(
            ["docker", *words], env=full, capture_output=True, text=True, timeout=timeout_s
        )
        if done.returncode:
            print(done.stdout[-8000:], done.stderr[-8000:], sep="\n")
            done.check_returncode()
        return done.stdout

    def make_base_images(self) -> None:
        """Make a Debian with Python for the build stages, and a smaller one for the images."""
        for name, packages in PACKAGES.items():
            self._import(name, packages)

    def _import(self, name: str, packages: str) -> None:
        root = self._folder / "rootfs"
        subprocess.run(
            ["debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", root],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        (root / "usr/bin/python").symlink_to("python3")
        bundle = Path("etc/ssl/certs/ca-certificates.crt")
        shutil.copy(Path("/") / bundle, root / bundle)
        if name == BUILD_IMAGE:
            (root / "etc/pip.conf").write_text(self._pip_conf(root, bundle))
        for folder in NOT_SLIM:
            shutil.rmtree(root / folder)
            (root / folder).mkdir()
        tar = subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE)
        with tar:
            subprocess.run(
                ["docker", "import", "-", name],
                stdin=tar.stdout,
                env={**os.environ, "DOCKER_HOST": self.host},
                check=True,
                stdout=subprocess.DEVNULL,
            )
        shutil.rmtree(root)

    def make_proxy_image(self) -> None:
        """Make an image of Debian's HAProxy under the name that compose.ha.yml runs; needs the
        base images.
        """
        text = f"""FROM {BUILD_IMAGE}
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends haproxy
"""
        context = self._folder / "proxy"
        context.mkdir(exist_ok=True)
        (context / "Dockerfile").write_text(text)
        words = ("build", "--quiet", "--network", "host", "--tag", PROXY_IMAGE, str(context))
        self.run(*words, env={"DOCKER_BUILDKIT": "0"}, timeout_s=600)

    def _pip_conf(self, root: Path, bundle: Path) -> str:
        """Return this machine's package sources; folders of wheels are copied into the image."""
        lines = ["[global]", f"cert = /{bundle}"]
        for key in PIP_KEYS:
            given = os.environ.get("PIP_" + key.upper().replace("-", "_"), "") or _pip_config(key)
            words = [word for word in given.split() if not word.startswith("file:")]
            for word in words:
                if Path(word).is_dir():
                    shutil.copytree(word, root / word.lstrip("/"), dirs_exist_ok=True)
            if words:
                lines.append(f"{key} = {' '.join(words)}")
        return "\n".join(lines) + "\n"


def _pip_config(key: str) -> str:
    words = [sys.executable, "-m", "pip", "config", "get", f"global.{key}"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


@contextmanager
def docker_engine(folder: Path) -> Iterator[DockerEngine]:
    """Run a daemon with all its state under `folder`. Raises RuntimeError if it does not start."""
    plugins = folder / "config/cli-plugins"
    plugins.mkdir(parents=True)
    binary = compose_binary()
    assert binary is not None
    (plugins / "docker-compose").symlink_to(binary)
    engine = DockerEngine(folder)
    paths = ["--data-root", folder / "data", "--exec-root", folder / "exec"]
    command = ["dockerd", *paths, "--pidfile", folder / "pid", "-H", engine.host]
    log = folder / "dockerd.log"
    with (
        log.open("wb") as out,
        subprocess.Popen([*command, *DAEMON_FLAGS, "--bridge=none"], stdout=out, stderr=out) as up,
    ):
        try:
            _wait(engine, up, log)
            yield engine
        finally:
            up.terminate()
            up.wait(60)
            unmount(folder)
    shutil.rmtree(folder)


def unmount(folder: Path) -> None:
    """Unmount what the daemon leaves mounted: the network namespace of its host network, layers."""
    lines = Path("/proc/mounts").read_text().splitlines()
    points = [line.split()[1] for line in lines]
    for point in sorted((p for p in points if p.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", point], check=True)


def _wait(engine: DockerEngine, up: "subprocess.Popen[bytes]", log: Path) -> None:
    probe = ["docker", "-H", engine.host, "version"]

    def answers() -> bool:
        if up.poll() is not None:
            raise RuntimeError(f"dockerd did not start:\n{log.read_text()[-2000:]}")
        return subprocess.run(probe, capture_output=True).returncode == 0

    wait_until(answers, lambda: f"dockerd:\n{log.read_text()[-2000:]}", START_S, 0.2)
