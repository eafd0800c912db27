"""control: the control plane under a thousand ranks, a thousand watchers and 4,096 heartbeats."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

from tests.bench import control_load as load
from tests.bench.control_server import Server, available, server
from tests.bench.result import Result, machine

STORES = ("memory", "sqlite", "redis")
GOALS = {
    "publish_1024_s": "under 1.0 with Redis",
    "publish_1024_commits": "under 60",
    "watch_ms_1": "under 5",
    "watch_ms_1000": "under 50",
    "old_versions_cost_ratio": "about 1",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--store", nargs="+", choices=STORES, default=list(STORES), help="stores to measure (those here)"
    )
    parser.add_argument("--ranks", type=int, default=1024, help="publications of one version (%(default)s)")
    parser.add_argument("--connections", type=int, default=1024, help="of all ranks together (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions, medians count (%(default)s)")
    parser.add_argument("--watchers", type=int, default=1000, help="(%(default)s)")
    parser.add_argument("--workers", type=int, default=4096, help="for the heartbeats (%(default)s)")
    parser.add_argument("--window", type=float, default=10.0, help="seconds of steady load (%(default)s)")
    parser.add_argument("--versions", type=int, default=200, help="live versions of 64 slots (%(default)s)")


def run(arguments: argparse.Namespace) -> Result:
    """Measure, part by part, each with a server of its own."""
    figures: dict[str, float | dict[str, float]] = {}
    for store in available(arguments.store):
        _by_store(figures, store, asyncio.run(_publications(store, arguments)))
    first = available(arguments.store)[0]
    for part in (_watching, _heartbeats, _memory, _old_versions):
        with server(first) as running:
            figures |= asyncio.run(part(running, arguments))
    conditions = (
        f"{machine()}; server and load share it; {arguments.ranks} ranks on {arguments.connections} "
        f"connections, medians of {arguments.rounds}; all but the publications on {first}"
    )
    return Result("The control plane", figures, GOALS, conditions)


def _by_store(figures: dict[str, float | dict[str, float]], store: str, measured: dict[str, float]) -> None:
    for name, value in measured.items():
        of_store = figures.setdefault(name, {})
        assert isinstance(of_store, dict)
        of_store[store] = value


async def _publications(store: str, arguments: argparse.Namespace) -> dict[str, float]:
    count: int = arguments.ranks
    ready_s, commits, cpu_s, store_cpu_s, all_bytes = [], [], [], [], []
    with server(store) as running:
        async with load.ranks(running.address, arguments.connections) as ranks:
            await load.register(ranks, count)
            for n in range(arguments.rounds + 1):  # the first is for warmth
                await load.create(ranks[0], f"v{n}", count)
                before = await _metric(running, "mx_rl_commits_total")
                cpu_before_s, store_before_s = running.cpu_s(), running.store_cpu_s()
                burst = await load.publish(ranks, f"v{n}", count)
                cpu_s.append(running.cpu_s() - cpu_before_s)
                store_cpu_s.append(running.store_cpu_s() - store_before_s)
                commits.append(await _metric(running, "mx_rl_commits_total") - before)
                ready_s.append(burst.ready_s)
                all_bytes.append(burst.bytes_per_rank)
                await asyncio.sleep(0.3)
            await load.create(ranks[0], "as-0.7", count)
            as_0_7 = await load.publish(ranks, "as-0.7", count, as_0_7=True)
    name = f"publish_{count}"
    return {
        f"{name}_s": statistics.median(ready_s[1:]),
        f"{name}_commits": statistics.median(commits[1:]),
        f"{name}_server_cpu_s": statistics.median(cpu_s[1:]),
        f"{name}_store_cpu_s": statistics.median(store_cpu_s[1:]),
        f"{name}_requests_per_rank": 1.0,
        f"{name}_bytes_per_rank": statistics.median(all_bytes[1:]),
        f"{name}_s_clients_0_7": as_0_7.ready_s,
        f"{name}_bytes_per_rank_clients_0_7": as_0_7.bytes_per_rank,
    }


async def _watching(running: Server, arguments: argparse.Namespace) -> dict[str, float]:
    async with load.ranks(running.address, arguments.connections) as ranks:
        one_ms = await load.watch_latency_ms(ranks, 1, 4 * arguments.rounds)
        before = load.wire_bytes()
        many_ms = await load.watch_latency_ms(ranks, arguments.watchers, arguments.rounds)
        carried = load.wire_bytes() - before
        await load.create(ranks[0], "idle", 64)
        streams = load.Watchers(ranks, "idle", arguments.watchers, heartbeat_ms=5_000)
        try:
            await streams.opened()
            await asyncio.sleep(1)
            cpu_s, began_s = running.cpu_s(), time.perf_counter()
            await asyncio.sleep(arguments.window)
            idle_share = (running.cpu_s() - cpu_s) / (time.perf_counter() - began_s)
        finally:
            await streams.close()
    messages = arguments.watchers * (arguments.rounds + 1)
    return {
        "watch_ms_1": one_ms,
        f"watch_ms_{arguments.watchers}": many_ms,
        "watch_bytes_per_message": carried / messages,
        "idle_watch_cpu_share": idle_share,
    }


async def _heartbeats(running: Server, arguments: argparse.Namespace) -> dict[str, float]:
    interval_s = 30.0  # a third of the default TTL
    async with load.ranks(running.address, arguments.connections) as ranks:
        await load.register(ranks, arguments.workers)
        cpu_s, began_s, carried = running.cpu_s(), time.perf_counter(), load.wire_bytes()
        rpcs = await load.heartbeats(ranks, arguments.workers, interval_s, arguments.window)
        took_s = time.perf_counter() - began_s
        share = (running.cpu_s() - cpu_s) / took_s
        carried = load.wire_bytes() - carried
    per_rank_s = took_s * arguments.workers
    return {
        "heartbeat_cpu_share": share,
        "heartbeat_requests_per_rank_per_s": rpcs / per_rank_s,
        "heartbeat_bytes_per_rank_per_s": carried / per_rank_s,
        "heartbeat_cpu_ms_per_request": share * took_s / rpcs * 1000,
    }


async def _memory(running: Server, arguments: argparse.Namespace) -> dict[str, float]:
    async with load.ranks(running.address, 16) as ranks:
        await load.register(ranks, 64)
        await load.create(ranks[0], "warm", 64)
        await load.publish(ranks, "warm", 64)
        before = running.resident_bytes()

        async def one(n: int) -> None:
            await load.create(ranks[n % 16], f"m{n}", 64)
            await load.publish(ranks, f"m{n}", 64)

        for start in range(0, arguments.versions, 8):
            await asyncio.gather(*(one(n) for n in range(start, min(start + 8, arguments.versions))))
        await asyncio.sleep(1)
        grown = running.resident_bytes() - before
    return {"mb_per_1000_versions": grown / 1e6 / arguments.versions * 1000}


async def _old_versions(running: Server, arguments: argparse.Namespace) -> dict[str, float]:
    async with load.ranks(running.address, 16) as ranks:
        await load.register(ranks, 64)

        async def one_ms(uid: str) -> float:
            began_s = time.perf_counter()
            await load.create(ranks[0], uid, 16)
            await load.publish(ranks, uid, 16)
            return (time.perf_counter() - began_s) * 1000

        few_ms = statistics.median([await one_ms(f"few{n}") for n in range(20)])
        for start in range(0, 2000, 100):
            await asyncio.gather(
                *(load.create(ranks[n % 16], f"old{n}", 4) for n in range(start, start + 100))
            )
        many_ms = statistics.median([await one_ms(f"many{n}") for n in range(20)])
    return {
        "version_ms_few_old": few_ms,
        "version_ms_2000_old": many_ms,
        "old_versions_cost_ratio": many_ms / few_ms,
    }


async def _metric(running: Server, name: str) -> float:
    return await asyncio.to_thread(running.metric, name)
