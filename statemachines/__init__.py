"""The lifecycles of versions, workers, leases, publications, installations and fleets, as pure machines.

Start with `version.py`: it is the system. `kernel.py` says how every machine decides; `world.py`
joins them all, so that what they promise together can be checked state by state. Nothing here does
input or output, reads a clock, or imports anything but the standard library and `transitions`.
"""
