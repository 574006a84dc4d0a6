"""An explicit-state model check of the hand-off: every interleaving of a small pdserve.

    config.py    how large the small pdserve is, which faults may strike it, and the list of runs
    rules.py     the functions of the product that are under check; a seeded bug replaces one
    memory.py    the blocks: the real job table, block tables and pools of both sides
    machines.py  the state machines of a hand-off, a lease and a request in the router, as tables
                 that fill up on demand
    state.py     the state of the world: plain tuples
    router.py, decode.py, prefill.py, faults.py   who can do what in a state
    writes.py    what goes into decode's blocks, and whether it may
    invariants.py  what must hold in every state, and at the end of every path
    check.py     breadth-first search; shortest counterexamples
    bugs.py      eleven seeded bugs, each a rule replaced by a plausible wrong one

What is real: the three machines, Promises, Bitmap, JobTable, Reservation, BlockTables, BlockPool
and chain hashes. What is modelled is what carries messages between them: the shells (Receiver,
Sender, DecodeCore, RoutedRequest) as far as they order events, the network and the processes.
"""
