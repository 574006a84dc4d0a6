"""Grammars through a router with real workers: invalid ones are refused with a message, and answers
stay exact when decode dies."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from builders.grammar_kit import of_regex
from systems.chaos.cluster import Cluster, Shape
from systems.chaos.model import write_chaos_model
from systems.cluster_secret import BEARER
from tokenizers import Tokenizer

from pdserve.protos import common_pb2 as pb
from pdserve.protos import router_pb2 as rpc
from pdserve.protos.router_pb2_grpc import RouterStub
from pdserve.services.common.errors import ServiceError

pytestmark = pytest.mark.extended

PATTERN = "[a-f]{3}(-[0-9]{4}){190}!"
LONG = [i * 7 % 250 for i in range(400)]  # long enough for remote prefill


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chaos_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cluster(model: Path, rings: Path, tmp_path_factory: Any) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), Shape(model), rings) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def router(cluster: Cluster) -> Iterator[RouterStub]:
    with grpc.insecure_channel(cluster.router) as channel:
        yield RouterStub(channel)


def generate(router: RouterStub, **params: Any) -> Iterator[rpc.GenerateResponse]:
    sampling = pb.SamplingParams(**({"max_tokens": 1000, "ignore_eos": True} | params))
    request = rpc.GenerateRequest(prompt_ids=LONG, params=sampling, seed=11)
    replies: Iterator[rpc.GenerateResponse] = router.Generate(request, metadata=BEARER, timeout=60)
    return replies


def all_of(replies: Iterator[rpc.GenerateResponse]) -> list[int]:
    return [token for reply in replies for token in reply.tokens.ids]


def test_a_killed_decode_worker_changes_no_token(
    cluster: Cluster, router: RouterStub, model: Path
) -> None:
    """The grammar begins after thinking, which its token budget ends."""
    end = [97, 40]
    params: dict[str, Any] = {
        "grammar": pb.Grammar(source=of_regex(PATTERN).source, begins_after=end),
        "thinking": pb.ThinkingBudget(max_tokens=20, end_ids=end),
    }
    replies = list(generate(router, **params))
    assert replies[-1].finished.remote
    calm = all_of(iter(replies))
    assert calm[20:22] == end
    tokenizer = Tokenizer.from_file(str(next(model.rglob("tokenizer.json"))))
    assert re.fullmatch(PATTERN, tokenizer.decode(calm[22:]))

    retries = cluster.view().retries
    ids: list[int] = []
    at_kill = 0
    for reply in generate(router, **params):
        ids += reply.tokens.ids
        if len(ids) > 60 and not at_kill:
            (victim,) = cluster.of("decode")
            cluster.kill(victim)
            cluster.refill()
            at_kill = len(ids)
    assert cluster.view().retries > retries, "the stream ended before the kill"
    assert 60 < at_kill < len(calm)
    assert ids == calm


@pytest.mark.parametrize(
    ("param", "params", "text"),
    [
        ("grammar", {"grammar": pb.Grammar(source="{}")}, "grammar"),
        ("grammar", {"grammar": pb.Grammar(source=of_regex("(").source)}, "regex"),
        (
            "grammar",
            {
                "grammar": pb.Grammar(
                    source=json.dumps(
                        {
                            "grammars": [
                                {"lark_grammar": "start: r0\n"
                                 + "\n".join(f"r{i}: r{i + 1}" for i in range(3500))
                                 + '\nr3500: "a"'}
                            ]
                        }
                    )
                )
            },
            "too complex",
        ),
        ("min_tokens", {"grammar": pb.Grammar(source="{}"), "min_tokens": 3}, "grammar"),
        ("bad_words", {"bad_words": [pb.TokenSequence(ids=[10_000])]}, "outside"),
        ("allowed_token_ids", {"allowed_token_ids": [10_000]}, "outside"),
        ("thinking", {"thinking": pb.ThinkingBudget(max_tokens=3)}, "end"),
        ("logprob_token_ids", {"logprob_token_ids": [3]}, "logprobs"),
    ],
)  # fmt: skip
def test_an_invalid_parameter_is_refused_with_its_name(
    router: RouterStub, param: str, params: dict[str, Any], text: str
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        all_of(generate(router, **params))
    error = ServiceError.from_rpc(refused.value)
    assert (error.code, error.param) == (pb.INVALID_ARGUMENT, param)
    assert text in error.message


def test_every_field_reaches_the_engine(router: RouterStub) -> None:
    replies = list(
        generate(
            router,
            max_tokens=12,
            allowed_token_ids=[64, 65],
            bad_words=[pb.TokenSequence(ids=[64, 64]), pb.TokenSequence(ids=[65, 65])],
            logprobs=1,
            logprob_token_ids=[9, 3],
            logit_bias={258: -100.0},
        )
    )
    ids = all_of(iter(replies))
    assert ids in ([64, 65] * 6, [65, 64] * 6)
    scores = [score for reply in replies for score in reply.tokens.logprobs]
    assert len(scores) == 12
    assert all(list(score.top_ids[1:]) == [9, 3] for score in scores)
