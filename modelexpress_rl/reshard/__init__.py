"""Which bytes of which source a generator rank reads, and proof that they are all and the right ones.

Engine-neutral and without I/O: numpy columns in, numpy columns out. In the order of use:
`geometry` (shards), `needs`, `manifest` (version 1), `merge`, `planner` (`plan` and `replan`), `plan`
(what they return), `proof`, `split` (into reads), `grid` and `digests` (how shards are cut and hashed),
`hashing` (by a trainer), `verify` (by a generator).
"""
