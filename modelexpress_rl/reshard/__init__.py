"""Which bytes of which source a generator rank reads, and proof that they are all and the right ones.

Engine-neutral and without I/O: numpy columns in, numpy columns out. In the order of use:
`geometry` (shards), `needs`, `manifest` (version 1), `merge`, `planner` (`plan` and `replan`), `plan`
(what they return), `proof`, `digests` (made by a trainer), `verify` (checked by a generator).
"""
