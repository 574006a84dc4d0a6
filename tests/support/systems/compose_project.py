"""The repository's compose files on an engine of the tests, on separate ports."""

import secrets
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from systems.docker_engine import BUILD_IMAGE, PYTHON_IMAGE, DockerEngine
from systems.eventually import wait_until

ROOT = Path(__file__).parents[3]
ROLES = ("gateway", "router", "prefill", "decode")
KEY = "compose-key"
MODEL = "SmolLM2-135M-Instruct"


class Project:
    """A project of `files` of the repository, one over the other; images are built from the
    checkout.
    """

    def __init__(
        self,
        engine: DockerEngine,
        folder: Path,
        files: Sequence[str] = ("docker-compose.yml",),
        name: str = "pdserve-test",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._engine = engine
        self._files = [ROOT / file for file in files]
        self._name = name
        override = folder / f"{name}.yml"
        # The engine has no bridge network: builds use the host's network.
        images = {"PYTHON_IMAGE": PYTHON_IMAGE, "BUILD_IMAGE": BUILD_IMAGE}
        builds = {role: {"build": {"network": "host", "args": images}} for role in ROLES}
        override.write_text(yaml.safe_dump({"services": builds}))
        self._files.append(override)
        self.port, grpc_port = free_ports(2)
        self._env = {
            "PDSERVE_CLUSTER_SECRET": secrets.token_urlsafe(32),
            "PDSERVE_API_KEY": KEY,
            "PDSERVE_PORT": str(self.port),
            "PDSERVE_GRPC_PORT": str(grpc_port),
            "TORCH_INDEX": "",
            "DOCKER_BUILDKIT": "0",
            **(env or {}),
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def compose(self, *words: str, timeout_s: float = 120) -> str:
        files = [word for file in self._files for word in ("-f", str(file))]
        name = ("--project-name", self._name)
        return self._engine.run(
            "compose", *name, *files, *words, env=self._env, timeout_s=timeout_s
        )

    def build(self) -> None:
        self.compose("build", timeout_s=1800)

    def up(self) -> None:
        """Start all services; returns when all are healthy."""
        self.compose("up", "--detach", "--wait", "--no-build", timeout_s=600)

    def down(self) -> None:
        self.compose("down", "--volumes")

    def containers(self, role: str) -> list[str]:
        """Return ids of a role's containers."""
        return self.compose("ps", "--quiet", role).split()

    def stop(self, container: str) -> int:
        """Send SIGTERM, and SIGKILL after stop_grace_period; return the exit code."""
        self._engine.run("stop", container, timeout_s=120)
        return self.exit_code(container)

    def exit_code(self, container: str) -> int:
        return int(self._engine.run("inspect", "--format", "{{.State.ExitCode}}", container))

    def start(self, container: str, timeout_s: float = 180) -> None:
        """Start a stopped container; returns when it is healthy."""
        self._engine.run("start", container)
        wait_until(
            lambda: self._health(container) == "healthy", f"{container} healthy", timeout_s, 0.5
        )

    def _health(self, container: str) -> str:
        return self._engine.run(
            "inspect", "--format", "{{.State.Health.Status}}", container
        ).strip()


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
