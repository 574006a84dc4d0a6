"""Structured answers of models with real vocabularies are unchanged after their decode worker is
killed."""

import json
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice, pairwise, product
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from builders.packaged_tokenizers import PACKAGED, NotFetched, PackagedModel
from builders.tiny_models import write_tiny
from oracles.held_answers import URL, Answer, streamed, whole
from safetensors.torch import load_file, save_file
from systems.chaos.cluster import Cluster, Shape
from systems.eventually import wait_until
from tokenizers import Tokenizer

pytestmark = [pytest.mark.extended, pytest.mark.timeout(1800)]
LIMIT_S = 300
LONG = 60  # items of an answer that must not end before the kill
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "array", "items": {"enum": ["monday", "friday"]},
                 "minItems": LONG, "maxItems": LONG},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}  # fmt: skip
FUNCTION = {"name": "get_weather", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ONE_CALL = {"parallel_tool_calls": False}  # a model that writes random tokens might make more calls
FORMS = ("forced", "named", "strict", "regex", "choice")
SEEDS = 8  # per form, so that each worker gets some of each; 200 answers over all models
# Bias of a call's first token. It makes a call likely but not certain at each position of a free
# text whose tokens are otherwise random.
LIKELY = 10.0
# How a free answer of gpt-oss begins, unless biases change its channel. Where a call is forced, a
# thought may come first; only its token budget ends the thought of a model that writes random
# tokens.
FINAL = ("assistant", "<|channel|>", "final", "<|message|>")
CHANNEL_LIKELY, CHANNEL_UNLIKELY = 20.0, -100.0  # biases
THOUGHT = 8  # tokens


@pytest.fixture(scope="module", params=PACKAGED)
def packaged(request: pytest.FixtureRequest) -> PackagedModel:
    try:
        return PACKAGED[request.param]()
    except NotFetched as error:
        pytest.skip(str(error))


def is_gpt_oss(words: Tokenizer) -> bool:
    return words.token_to_id(FINAL[1]) is not None


def call_ids(packaged: PackagedModel, words: Tokenizer) -> list[int]:
    """Return the tokens that begin a call; for gpt-oss, without the token that begins any
    message."""
    ids: list[int] = words.encode(packaged.begin, add_special_tokens=False).ids
    return ids[1:] if is_gpt_oss(words) else ids


def teach(folder: Path, ids: Sequence[int]) -> None:
    """Make each of these tokens the most likely successor of the one before it."""
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    embeddings, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    for before, after in pairwise(ids):
        embeddings[before] *= 20  # so that the layers change its direction little
        head[after] += 5 * embeddings[before] / embeddings[before].norm()
    save_file(tensors, path, {"format": "pt"})


@pytest.fixture(scope="module")
def model(packaged: PackagedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = Tokenizer.from_buffer(packaged.tokenizer)
    eos = [words.token_to_id(text) for text in packaged.eos]
    folder = write_tiny(
        tmp_path_factory.mktemp("model") / "tiny",
        "qwen3",
        vocab_size=words.get_vocab_size(),
        num_hidden_layers=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=eos[0],
    )
    if is_gpt_oss(words):
        teach(folder, [words.token_to_id(text) for text in FINAL])
    teach(folder, call_ids(packaged, words))
    (folder / "tokenizer.json").write_bytes(packaged.tokenizer)
    config = {"eos_token": packaged.eos[0], "chat_template": packaged.template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return folder


@pytest.fixture(scope="module")
def cluster(model: Path, rings: Path, tmp_path_factory: Any) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), Shape(model, decodes=2), rings) as cluster:
        yield cluster


class Client:
    """Sends the requests of a run; no request finds blocks that another run has cached."""

    def __init__(self, url: str, run: str, packaged: PackagedModel) -> None:
        self._url = url + URL
        self._run = run
        words = Tokenizer.from_buffer(packaged.tokenizer)
        first, final = call_ids(packaged, words)[0], words.token_to_id(FINAL[2])
        self._bias, self._budget = {first: LIKELY}, {}
        if is_gpt_oss(words):
            self._bias = {first: CHANNEL_LIKELY, final: CHANNEL_UNLIKELY}
            self._budget = {"thinking_token_budget": THOUGHT}
        self.regex = f"([a-f]{{3}}-[0-9]{{4}} ){{{LONG}}}{re.escape(packaged.tag)}"
        self.choices = [f"{word} {packaged.tag} " * 2 * LONG for word in ("yes", "no", "perhaps")]

    def _fields(self, form: str) -> dict[str, Any]:
        match form:
            case "forced":
                return {"tools": [TOOL], "tool_choice": "required", **ONE_CALL}
            case "named":
                return {"tools": [TOOL], "tool_choice": NAMED}
            case "strict":
                strict = {**TOOL, "function": {**FUNCTION, "strict": True}}
                return {"tools": [strict], "logit_bias": self._bias, **ONE_CALL}
            case "regex":
                return {"guided_regex": self.regex}
            case _:
                return {"guided_choice": self.choices}

    def _body(self, form: str, seed: int) -> dict[str, Any]:
        question = f"{form} {seed}: " + "How is the weather today? " * 30
        return {
            "model": "tiny",
            "messages": [{"role": "user", "content": question}],
            "seed": seed,
            "temperature": 1,
            "max_tokens": 3000,
            "cache_salt": f"{self._run} {form} {seed}",
            "chat_template_kwargs": {"enable_thinking": False},
            **self._budget,
            **self._fields(form),
        }

    def ask(self, form: str, seed: int) -> httpx.Response:
        return httpx.post(self._url, json=self._body(form, seed), timeout=LIMIT_S)

    def chunks(self, form: str, seed: int) -> Iterator[dict[str, Any]]:
        body = {**self._body(form, seed), "stream": True}
        with httpx.stream("POST", self._url, json=body, timeout=LIMIT_S) as reply:
            assert reply.status_code == 200, reply.read()
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))

    def check(self, form: str, answer: Answer) -> None:
        """Raise AssertionError if an answer does not have its form."""
        text, calls, finish = answer
        for name, arguments in calls:
            assert name == "get_weather"
            jsonschema.validate(json.loads(arguments), PARAMETERS)
        assert finish == ("tool_calls" if calls and form != "named" else "stop")
        match form:
            case "forced" | "named":
                assert calls
                assert not text
            case "regex":
                assert re.fullmatch(self.regex, text)
            case "choice":
                assert text in self.choices
            case _:
                assert calls


def warm(cluster: Cluster, client: Client, pool: ThreadPoolExecutor) -> None:
    """Make every decode worker load the grammar compiler, which takes long on a busy machine."""
    seeds = count()

    def all_answered() -> bool:
        replies = list(pool.map(lambda seed: client.ask("named", seed), islice(seeds, 4)))
        if any(reply.status_code == 503 for reply in replies):
            return False  # the compiler was not ready in time; the answer says to try again
        for reply in replies:
            whole(reply)
        loads = cluster.loads()
        return all(
            loads[worker.incarnation].generation_tokens for worker in cluster.joined("decode")
        )

    wait_until(all_answered, "answers of all decode workers", limit_s=LIMIT_S)


def tries(log: str) -> dict[str, int]:
    """Return the number of tries by request, from a router's log."""
    return {found[2]: int(found[1]) for found in re.finditer(r"tries=(\d+) .*request=(\S+)", log)}


def test_a_killed_worker_changes_no_structured_answer(
    cluster: Cluster, packaged: PackagedModel, subtests: pytest.Subtests
) -> None:
    client = Client(cluster.url, "calm", packaged)
    requests = list(product(FORMS, range(SEEDS)))
    with ThreadPoolExecutor(len(requests)) as pool:
        warm(cluster, Client(cluster.url, "warm", packaged), pool)
        remote = cluster.view().prefill_remote
        replies = pool.map(lambda pair: client.ask(*pair), requests)
        calm = {pair: whole(reply) for pair, reply in zip(requests, replies, strict=True)}
        assert cluster.view().prefill_remote == remote + len(requests)

        client = Client(cluster.url, "killed", packaged)
        taken: dict[tuple[str, int], list[dict[str, Any]]] = {pair: [] for pair in requests}
        ended = threading.Event()

        def stream(pair: tuple[str, int]) -> None:
            for chunk in client.chunks(*pair):
                taken[pair].append(chunk)
            ended.set()

        streams = [pool.submit(stream, pair) for pair in requests]
        wait_until(lambda: ended.is_set() or all(len(taken[pair]) > 4 for pair in requests))
        num_taken = {pair: len(chunks) for pair, chunks in taken.items()}
        assert not ended.is_set(), f"a stream ended before the kill: {num_taken}"
        assert cluster.view().prefill_remote == remote + 2 * len(requests)
        at_kill = {pair: len(chunks) for pair, chunks in taken.items()}
        cluster.kill(cluster.of("decode")[0])
        for one in streams:
            one.result(LIMIT_S)
    tried = tries(cluster.router_log())
    for (form, seed), answer in calm.items():
        with subtests.test(form=form, seed=seed):
            client.check(form, answer)
            chunks = taken[form, seed]
            assert 4 < at_kill[form, seed] < len(chunks)
            assert streamed(chunks) == answer
    again = [form for (form, _), chunks in taken.items() if tried[chunks[0]["id"]] > 1]
    assert set(again) == set(FORMS), "the killed worker had no stream of some form"
