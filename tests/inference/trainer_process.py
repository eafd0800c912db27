"""A trainer in a process of its own: `python -m tests.inference.trainer_process ADDRESS WORKER`.

Reads one version id per line, publishes the weights of that step (`v7` is step 7), says so.
"""

from __future__ import annotations

import sys

import anyio
import anyio.to_thread

from modelexpress_rl.rpc import ControlPlane, parse_address
from modelexpress_rl.transport.nixl import NixlAgent
from tests.inference.publisher import Publisher, create_version, whole
from tests.inference.world import weights


async def main(address: str, worker_id: str) -> None:
    async with ControlPlane(parse_address(address), rpc_timeout_s=5.0) as control:
        agent = await NixlAgent.create(f"agent-{worker_id}", host="127.0.0.1", listen=False)
        async with Publisher(control, agent, worker_id) as publisher:
            held = whole(weights(0))
            print("up", flush=True)
            while line := (await anyio.to_thread.run_sync(sys.stdin.readline)).strip():
                for shard, data in zip(held, weights(int(line[1:])).values(), strict=True):
                    shard.data[...] = data
                await create_version(control, line, ["s0"])
                await publisher.publish(line, "s0", held)
                print(f"published {line}", flush=True)


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
