"""A fleet of generators that goes to a new version together, or not at all. For orchestrators.

    async with Fleet(current_version_id="v6") as fleet:
        await fleet.admit("g0", generator_0)  # brought to v6 first, if need be
        await fleet.admit("g1", generator_1)
        report = await fleet.update("v7")     # all stage, then all install; FleetAborted: all serve v6

The machine that decides is `statemachines/fleet.py`. What a generator must be able to do is in `port.py`;
`in_process.py` makes one of a generator client, `vllm_server.py` one of a vLLM server. Neither torch nor a
transport is needed here.
"""

from modelexpress_rl.fleet.fleet import Fleet
from modelexpress_rl.fleet.in_process import InProcessGenerator
from modelexpress_rl.fleet.policy import FleetPolicy
from modelexpress_rl.fleet.port import FleetGenerator, Holding
from modelexpress_rl.fleet.report import FleetAborted, FleetReport
from modelexpress_rl.fleet.update import FleetUpdate
from modelexpress_rl.fleet.vllm_server import VllmServer

__all__ = [
    "Fleet",
    "FleetAborted",
    "FleetGenerator",
    "FleetPolicy",
    "FleetReport",
    "FleetUpdate",
    "Holding",
    "InProcessGenerator",
    "VllmServer",
]
