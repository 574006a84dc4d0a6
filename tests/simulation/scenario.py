"""Description of one run: a cluster, requests and faults, as plain data that is stored as JSON.

A scenario with its seed determines a run completely. docs/simulation.md describes its fields.
"""

import json
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

BLOCK = 4
CHUNK = 8


@dataclass(frozen=True)
class Ask:
    """One request of one client."""

    name: str
    at_s: float  # after the cluster has started
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    n: int = 1
    timeout_s: float = 120.0
    gateway: int = 0
    priority: int = 0


@dataclass(frozen=True)
class Fault:
    """A fault that strikes when `request` reaches `phase` for the index-th time (from 0)."""

    kind: str
    phase: str
    request: str
    index: int = 0
    seed: int = 0  # for the fault's durations, directions and bytes


@dataclass(frozen=True)
class Scenario:
    """A cluster and the events of a run."""

    seed: int  # for delays, ids and routing
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...] = ()
    gateways: int = 1
    routers: int = 1
    prefills: int = 2
    decodes: int = 2
    prefill_blocks: int = 48
    decode_blocks: int = 48
    window: int = 0  # tokens of the second layer group's window; 0: no such group

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Scenario":
        data: dict[str, Any] = json.loads(text)
        asks = tuple(Ask(**a | {"prompt": tuple(a["prompt"])}) for a in data.pop("asks"))
        faults = tuple(Fault(**f) for f in data.pop("faults"))
        return cls(asks=asks, faults=faults, **data)

    def ask(self, name: str) -> Ask:
        return next(a for a in self.asks if a.name == name)

    def without_faults(self) -> "Scenario":
        return replace(self, faults=())


TARGET = "target"
DEAF = "router hears no worker"  # a hit if the router detects that it is isolated


def draw(seed: int, kind: str, phase: str) -> Scenario:
    """Return a scenario around one cell of the fault matrix; its requests have three priorities."""
    rng = Random(f"scenario {seed} {kind} {phase}")
    prefix = tuple(rng.randrange(1, 64) for _ in range(12))

    def prompt(low: int, high: int) -> tuple[int, ...]:
        ids = tuple(rng.randrange(1, 64) for _ in range(rng.randint(low, high)))
        return prefix + ids if rng.random() < 0.3 else ids

    asks = [
        Ask("warm", 0.0, prompt(20, 30), rng.randint(1, 3), rng.getrandbits(32)),
        Ask(TARGET, rng.uniform(0.3, 0.5), prompt(26, 44), rng.randint(8, 14), rng.getrandbits(32),
            n=rng.choice((1, 1, 1, 2))),
    ]  # fmt: skip
    gateways = 2 if "gateway" in kind or rng.random() < 0.2 else 1
    for number in range(rng.randint(1, 4)):
        short = rng.random() < 0.4
        asks.append(
            Ask(
                f"other{number}",
                rng.uniform(0.25, 0.7),
                prompt(1, 14) if short else prompt(17, 40),
                rng.randint(1, 16),
                rng.getrandbits(32),
                n=rng.choice((1, 1, 2)),
                gateway=rng.randrange(gateways),
            )
        )
    pair = kind.endswith("prefill-decode") or kind == "replay of a frame"
    if kind == "other weights" and phase == "claimed":
        asks = [a for a in asks if a.name == TARGET]  # the first contact of the two workers
    twins = _twins(rng, next(a for a in asks if a.name == TARGET)) if phase == "followed" else []
    asks += twins
    several = phase in ("computing", "transferring", "decoding")
    index = rng.randint(0, 2) if several else 0
    deaf = kind == DEAF  # needs a single router and four workers
    routers, prefills = rng.choice((1, 2)), rng.choice((1, 2, 2))
    decodes = rng.choice((1, 1, 2) if twins else (1, 2, 2))
    asks = [replace(ask, priority=(i + seed) % 3 - 1) for i, ask in enumerate(asks)]
    return Scenario(
        seed=seed,
        asks=tuple(sorted(asks, key=lambda a: a.at_s)),
        faults=(Fault(kind, phase, TARGET, index, rng.getrandbits(32)),),
        gateways=gateways,
        routers=1 if deaf else routers,
        prefills=2 if deaf else 1 if pair else prefills,  # 1: connected from the start
        decodes=2 if deaf else 1 if pair else decodes,
        prefill_blocks=rng.choice((24, 48)),
        decode_blocks=rng.choice((48, 64)),
        window=0 if twins else rng.choice((0, 0, 10)),  # window layers exclude single flight
    )


TWIN = "twin"


def _twins(rng: Random, target: Ask) -> list[Ask]:
    """Return requests with the target's prompt, or most of it, that arrive during the transfer of
    its KV."""
    twins = []
    for number in range(rng.randint(2, 4)):
        tail = tuple(rng.randrange(1, 64) for _ in range(rng.choice((0, 0, 3, 20))))
        keep = len(target.prompt) - (len(tail) > 0) * rng.randint(0, 6)
        at_s = target.at_s + rng.uniform(0.0, 0.012)
        prompt, seed = target.prompt[:keep] + tail, rng.getrandbits(32)
        twins.append(Ask(f"{TWIN}{number}", at_s, prompt, rng.randint(1, 12), seed))
    return twins
