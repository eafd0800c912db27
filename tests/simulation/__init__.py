"""A whole job in one process, on virtual time: real servers and clients, and all that goes wrong.

    python -m tests.simulation --seed 4711             replay one seed, with its event log
    python -m tests.simulation --seeds 0:10000         run many; a failing one is printed with its command
    python -m tests.simulation --seed 13 --bug stale-timer
    python -m tests.simulation --regenerate            write the transcripts of tests/data/transcripts anew

What is real: the registry with its expiry, lanes and watches, the servicers, the trainer's and the
generator's clients with everything behind them, the orchestrator's client, and the bytes, which are copied
from the trainers' buffers. What is simulated: time and threads (`loop.py`, which also pauses and kills
processes), clocks that drift (`clocks.py`), the network (`network.py`, `calls.py`, `peers.py`), the
transport's reads, which are slow and torn (`transport.py`), and the way to a store that several servers
share (`store.py`).

`hosts.py`, `trainers.py`, `generators.py` and `orchestrator.py` are the processes, `job.py` is what their
framework tells them. `chaos.py` draws from the seed what goes wrong, `monitor.py` asserts P1 to P8 on what
really happened, `world.py` is one run: chaos, then calm, in which everything must drain, the last version be
served, and the store become empty. `planted.py` has bugs that the simulation must find.

The same seed gives the same run in any process; `loop.determinism` lists what that takes. Two things that
the promises rest on are kept, because nobody could promise anything without: clocks drift by 1 % at most
(a lease has a margin of 10 %), and no request is carried out more than 0.8 s after its caller has heard
that it failed (a publisher's bound has a margin of 1 s). On a real network a handler is cancelled at its
caller's deadline, which bounds that.
"""
