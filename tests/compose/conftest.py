"""One Docker engine and one running system, shared by all container tests."""

from collections.abc import Iterator

import pytest
from builders.changed_weights import write_changed
from systems.compose_project import KEY, MODEL, Project
from systems.docker_engine import DockerEngine, docker_engine, missing

from pdserve.cli.http_client import ApiClient


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerEngine]:
    if reason := missing():
        pytest.skip(f"DOCKER COMPOSE WAS NOT TESTED: {reason}")
    with docker_engine(tmp_path_factory.mktemp("docker")) as made:
        made.make_base_images()
        yield made


@pytest.fixture(scope="session")
def project(engine: DockerEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    folder = tmp_path_factory.mktemp("project")
    folder.chmod(0o755)  # the workers' user must be able to read the second pool's model
    write_changed(folder / "other.gguf").chmod(0o644)
    second = {"PDSERVE_MODELS": str(folder), "PDSERVE_MODEL_B": "/models/other.gguf"}
    second["PDSERVE_SERVED_NAME"] = MODEL
    made = Project(engine, folder, ("docker-compose.yml", "compose.pools.yml"), env=second)
    made.build()
    try:
        made.up()
        yield made
    finally:
        print(made.compose("logs", "--no-color"))
        made.down()


@pytest.fixture(scope="session")
def client(project: Project) -> ApiClient:
    return ApiClient(project.url, KEY, timeout_s=120)


@pytest.fixture(scope="session")
def built(engine: DockerEngine, project: Project) -> DockerEngine:
    """Return an engine on which the images are built."""
    assert project
    return engine
