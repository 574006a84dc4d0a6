"""An explicit-state model check of the hand-off: every interleaving of a small pdserve.

    config.py    size of the small pdserve, the faults that may occur, and the list of runs
    rules.py     the functions of the product that are under check; a seeded bug replaces one
    memory.py    the blocks: the real job table, block tables and pools of both sides
    machines.py  the state machines of a hand-off, a lease and a request in the router, as tables
                 that are filled on demand
    state.py     the state of the world: plain tuples
    router.py, decode.py, prefill.py, faults.py   possible moves of each process in a state
    writes.py    the writes into decode's blocks, and whether they are allowed
    invariants.py  conditions of every state, and of the end of every path
    check.py     breadth-first search; shortest counterexamples
    bugs.py      eleven seeded bugs, each a rule replaced by a plausible wrong one

The product's code: the three machines, Promises, Bitmap, JobTable, Reservation, BlockTables,
BlockPool and chain hashes. Modelled is the code that carries messages between them: the shells
(Receiver, Sender, DecodeCore, RoutedRequest) as far as they order events, the network and the
processes.
"""
