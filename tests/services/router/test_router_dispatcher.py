"""The dispatcher under any sequence of events, with time as a number and no sockets."""

from random import Random

from fakes.recorder import HITS
from hypothesis import settings
from systems.dispatcher_machine import DispatcherMachine

from pdserve.protos import fleet_pb2
from pdserve.services.router.fleet import taking_work


def test_no_request_begins_after_its_deadline() -> None:
    """Covers a request that waits for a worker and one that has lost its first worker."""
    machine = DispatcherMachine()
    machine.begin("never", 0)
    machine.issue("retried", 1, 40, 1, 0, 1000)
    assert len(machine.at_decode) == 1
    (first,) = machine.at_decode.values()
    for worker in machine.fleet.of(fleet_pb2.DECODE, "m"):
        machine.dispatcher.disconnected(worker, False, machine.now)
    machine.issue("waiting", 1, 40, 1, 0, 1000)
    machine.at_decode.clear()
    machine.now += 1.0
    for worker in machine.fleet.of(fleet_pb2.DECODE, "m"):
        worker.connected = True
        machine.dispatcher.on_load(worker, machine.now)  # before the tick that ends them
    assert taking_work([first.worker], machine.now)
    assert not machine.at_decode
    assert machine.client.terminal == {}
    machine.dispatcher.tick(machine.now)
    assert machine.client.terminal == {("retried", 1): 1, ("waiting", 1): 1}


TestDispatcherMachine = DispatcherMachine.TestCase
TestDispatcherMachine.settings = settings(max_examples=60, stateful_step_count=50)


WEIGHTS = {"submit": 4, "admit": 12, "generate": 14, "prefill": 10, "time": 4, "join": 2}
WEIGHTS |= {"lose": 8, "handoff": 3, "cancel": 1, "again": 4, "resume": 9, "wait": 6}


def drive(machine: DispatcherMachine, random: Random, steps: int) -> None:
    """Run the same rules for long, with probabilities under which requests make progress."""
    machine.begin(random.choice(["auto", "always", "always", "never"]), random.randrange(100))
    names = ["r"]
    for _ in range(steps):
        what = random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        which = random.randrange(6)
        if what == "submit":
            queue, left = random.choice([0, 500, 60_000]), random.choice([0, 0, 5_000, 60_000])
            names.append(machine.submit(random.choice([1, 40]), random.choice([1, 2]), queue, left))
        elif what == "admit":
            machine.answer_admit(
                which, random.choices(["ok", "follows", "busy", "gone"], [6, 2, 2, 1])[0]
            )
        elif what == "generate":
            repeat, in_rows = random.random() < 0.3, random.random() < 0.5
            machine.generate(which, random.choice([1, 2]), repeat, in_rows)
        elif what == "prefill":
            machine.prefill(which, random.choices(["done", "accepted", "failed"], [4, 4, 1])[0])
        elif what == "time":
            machine.pass_time(random.choice([0.01, 0.2, 0.2, 3.0]))
        elif what == "join" and len(machine.fleet.workers) < 6:
            machine.join(random.choice([fleet_pb2.DECODE, fleet_pb2.PREFILL]))
        elif what == "lose":
            machine.lose(which, random.random() < 0.5)
        elif what == "resume":
            machine.answer_resume(which, random.random() < 0.2)
        elif what == "wait":
            machine.end_wait(which, random.random() < 0.6)
        elif what == "handoff":
            machine.lose_handoff(which)
        elif what == "cancel":
            machine.cancel(random.choice(names), random.choice([(), (0,), (0, 1)]))
        elif what == "again" and len(names) > 1:
            machine.issue_again(random.choice(names[1:]), random.randrange(2))
        machine.attempts_belong_to_live_requests()
        machine.every_request_is_alive_or_has_ended_once()
    machine.teardown()


def test_long_runs_reach_every_interesting_state() -> None:
    HITS.clear()
    for seed in range(150):
        drive(DispatcherMachine(), Random(seed), 150)
    wanted = [
        *("finished", "CANCELLED", "QUEUE_TIMEOUT", "DEADLINE_EXCEEDED", "POISON_REQUEST"),
        *(
            "OVERLOADED",
            "cancelled",
            "lost",
            "replaced",
            "repeated",
            "tokens",
            "rows",
            "handoff lost",
        ),
        *("adopted", "adopted with a ticket", "resume gone"),
        *("admit follows", "attached", "placed again"),
        *("prefill done", "prefill failed", "admit ok", "admit busy", "admit gone"),
    ]
    print({name: HITS[name] for name in wanted})
    assert not [name for name in wanted if HITS[name] < 5]
