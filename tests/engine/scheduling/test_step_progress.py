"""StepProgress alone, over a job table; plans and sampled tokens are simulated.

A reference records the tokens of each choice. Events, finish reasons and blocks must agree with it.
"""

import random
from collections import Counter, defaultdict

from builders.job_kit import VOCAB, check_table, make_job, make_jobs, prompt_of

from pdserve.engine.api import (
    Event,
    Finished,
    FinishReason,
    NewTokens,
    PrefillComputed,
    PromptScored,
    RequestFailed,
    TokenLogprob,
)
from pdserve.engine.scheduling import (
    EngineLimits,
    Outcome,
    Plan,
    RequestState,
    Row,
    SampledToken,
    Sequence,
    StepProgress,
)

RUNS = 1500
SLOTS = 4
EOS, STOP = 0, 5
CHUNK = 4


class Bench:
    """Requests in a batch, with a scheduler that gives each one a row if it can."""

    def __init__(self, rng: random.Random, reached: Counter[str]) -> None:
        self.rng, self.reached = rng, reached
        size, window = rng.choice((2, 4)), rng.choice((0, 5))
        eos = frozenset({EOS})
        self.limits = EngineLimits(VOCAB, 64, size, 60, SLOTS, CHUNK, eos_ids=eos)
        self.jobs = make_jobs(self.limits, window)
        self.progress = StepProgress(self.jobs, self.limits)
        self.requests: dict[str, RequestState] = {}
        self.sampled: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        self.heard: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        self.reasons: dict[tuple[str, int], FinishReason] = {}
        self.aborted: set[tuple[str, int]] = set()
        self.stuck: set[tuple[str, int]] = set()  # choices without an allowed token
        self.last: Counter[str] = Counter()  # Finished and RequestFailed events
        self.scores: defaultdict[str, int] = defaultdict(int)
        self.computed: dict[str, int] = {}

    def submit(self) -> None:
        key = f"r{len(self.requests)}"
        prompt = prompt_of(self.rng, self.rng.randrange(1, 10))
        n = self.rng.randrange(1, 4)
        params = {"n": n, "max_tokens": self.rng.randrange(1, 6), "min_tokens": 0}
        params["min_tokens"] = self.rng.randrange(params["max_tokens"] + 1)
        if self.rng.random() < 0.2:
            params["prompt_logprobs"] = 0
        order, stops = len(self.requests), (STOP,) if self.rng.random() < 0.5 else ()
        if self.rng.random() < 0.15:
            job = make_job(self.limits, key, order, prompt, prefill_only=True)
        else:
            ignore = self.rng.random() < 0.3
            job = make_job(
                self.limits, key, order, prompt, **params, stop_token_ids=stops, ignore_eos=ignore
            )
        self.requests[key] = job
        self.jobs.add(job)
        self.hear(self.progress.end_complete(job))

    def step(self) -> None:
        for job in list(self.jobs.waiting.values()):
            if job.num_places <= self.jobs.num_free_slots:
                assert self.jobs.admit(job) is not None
                job.announced = True
                if not job.sequences[0].num_left:
                    self.jobs.hold(job)
        rows = [self.row(s) for job in self.jobs.running for s in job.sequences]
        rows = [row for row in rows if self.rng.random() < 0.9]
        for row in rows:
            assert self.jobs.extend(row.sequence, row.end) is not None
        outcomes = [self.outcome(row) for row in rows]
        self.hear(self.progress.apply(Plan([], rows=rows), outcomes))
        self.check()

    def row(self, sequence: Sequence) -> Row:
        start, total = sequence.num_computed, len(sequence.ids)
        end = min(total, (start // CHUNK + 1) * CHUNK)
        return Row(sequence, start, end, sequence.choices if end == total else (), end - 1)

    def outcome(self, row: Row) -> Outcome:
        job = row.sequence.job
        scores: tuple[TokenLogprob, ...] = ()
        if row.sequence.is_prefix and job.prompt_scores is not None:
            count = min(row.end, job.prompt_len - 1) - row.start
            scores = (TokenLogprob(-1.0),) * max(0, count)
        if row.choices and self.rng.random() < 0.01:
            self.reached["sampling failed"] += 1
            return Outcome((SampledToken(-1, error="no token"),) * len(row.choices), scores)
        tokens = tuple(self.sample() for _ in row.choices)
        for choice, token in zip(row.choices, tokens, strict=True):
            if token.error:
                self.stuck.add((job.key, choice))
            else:
                self.sampled[job.key, choice].append(token.token)
        return Outcome(tokens, scores)

    def sample(self) -> SampledToken:
        if self.rng.random() < 0.02:
            return SampledToken(-1, error="no token", param="grammar", no_token=True)
        return SampledToken(self.rng.randrange(VOCAB))

    def hear(self, events: list[Event]) -> None:
        for event in events:
            assert not self.last[event.key], "an event after the last one"
            job = self.requests[event.key]
            match event:
                case NewTokens(_, choice, position, ids, _, finish):
                    at = event.key, choice
                    assert at not in self.reasons, "tokens after the end of a choice"
                    assert position == len(self.heard[at])
                    self.heard[at] += ids
                    if finish is not None:
                        self.reasons[at] = finish
                        self.reached[finish.value] += 1
                case PrefillComputed(_, num_tokens, done):
                    assert num_tokens > self.computed.get(event.key, 0)
                    self.computed[event.key] = num_tokens
                    self.reached["prefilled"] += done and job.request.prefill_only
                    assert (event.key in self.jobs.held) <= done
                case PromptScored(_, scores):
                    assert len(scores) == job.prompt_len - 1
                    assert not any(self.heard[event.key, c] for c in range(len(job.finish)))
                    self.reached["scored"] += 1
                case RequestFailed(_, _, param):
                    stuck = sum(key == job.key for key, _ in self.stuck)
                    assert not param or stuck == job.request.params.n
                    self.reached["all stuck"] += bool(param)
                    self.last[event.key] += 1
                case Finished():
                    self.last[event.key] += 1
                    assert all((event.key, c) in self.reasons for c in range(len(job.finish)))

    def abort(self) -> None:
        job = self.rng.choice(list(self.jobs.by_key.values()))
        some = [c for c in range(len(job.finish)) if self.rng.random() < 0.5]
        unfinished = set(some or range(len(job.finish))) & set(job.unfinished)
        self.aborted |= {(job.key, c) for c in unfinished}
        self.reached["in its prefix"] += any(s.is_prefix for s in job.sequences)
        self.hear(self.progress.abort(job, some))
        if job.request.prefill_only:
            self.last[job.key] += 1  # it ends without an event

    def check(self) -> None:
        check_table(self.jobs, SLOTS)
        for job in self.jobs.running:
            for sequence in job.sequences:
                if not sequence.is_prefix:
                    (choice,) = sequence.choices
                    assert sequence.ids == job.branch_ids(choice)
                    assert job.finish[choice] is None

    def check_end(self) -> None:
        assert not self.jobs.by_key
        for pool in self.jobs.tables.pools:
            assert pool.num_available == pool.num_blocks
        for (key, choice), reason in self.reasons.items():
            params = self.requests[key].request.params
            ids = self.heard[key, choice]
            assert ids == self.sampled[key, choice][: len(ids)]
            stops = self.limits.stop_ids(params)
            if (key, choice) in self.aborted:
                assert reason is FinishReason.ABORTED
            elif (key, choice) in self.stuck:
                assert reason is FinishReason.LENGTH
                self.reached["one stuck"] += 1
            elif reason is FinishReason.STOP:
                assert ids[-1] in stops
                assert len(ids) > params.min_tokens
            else:
                assert reason is FinishReason.LENGTH
                assert len(ids) == params.max_tokens
            ended = [n for n, t in enumerate(ids) if t in stops and n + 1 > params.min_tokens]
            assert all(n == len(ids) - 1 for n in ended), "a choice continued after its stop token"
        assert all(self.last[key] == 1 for key in self.requests), self.last
        assert self.progress.generated_tokens == sum(map(len, self.heard.values()))


def test_random_steps_give_every_choice_its_tokens_and_its_end() -> None:
    reached = Counter[str]()
    for seed in range(RUNS):
        bench = Bench(random.Random(seed), reached)
        for _ in range(12):
            if bench.rng.random() < 0.4:
                bench.submit()
            if bench.jobs.by_key and bench.rng.random() < 0.1:
                bench.abort()
            bench.step()
        for _ in range(200):
            for job in list(bench.jobs.held.values()):
                bench.jobs.end(job)
                bench.last[job.key] += 1
            if not bench.jobs.by_key:
                break
            bench.step()
        bench.check_end()
    kinds = [reason.value for reason in (FinishReason.STOP, FinishReason.LENGTH)]
    kinds += [FinishReason.ABORTED.value, "prefilled", "scored", "sampling failed", "in its prefix"]
    kinds += ["one stuck", "all stuck"]
    assert all(reached[kind] > 30 for kind in kinds), reached
