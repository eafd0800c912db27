"""`mx-rl bench transport`: measure what reads cost on this machine, and store it for planning."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

import anyio
from rich.table import Table

from modelexpress_rl import envs
from modelexpress_rl.cli import common
from modelexpress_rl.errors import DeadlineExceeded, UsageError
from modelexpress_rl.reshard.cost import DEFAULT_COST, TransportCost, store_cost

_MEANINGS = {
    "wire_bytes_per_s": "reads in big runs",
    "run_s": "each further run of a read",
    "read_s": "each read",
    "copy_bytes_per_s": "a strided copy on this host",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "what", choices=["transport"], help="transport: reads between two processes of this host"
    )
    parser.add_argument("--mib", type=int, default=256, help="how much is read at a time (%(default)s)")
    parser.add_argument("--output", metavar="PATH", help="where to store it (MX_TRANSPORT_COST_FILE)")
    parser.add_argument("--no-store", action="store_true", help="only print it")
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="SECONDS", help="for all of it (%(default)s)"
    )
    common.add_json(parser, "one JSON object: the constants, and `stored` where they were")


def run(options: argparse.Namespace) -> int:
    """Measure, print, store.

    Raises:
        UsageError: NIXL is not installed or can't start, or the file can't be written.
        DeadlineExceeded: it took longer than `--timeout`.
    """
    if not 16 <= options.mib <= 1 << 16:
        raise UsageError(f"--mib must be 16 to {1 << 16}, not {options.mib}")
    timeout_s = common.timeout_s(options)
    path = None if options.no_store else Path(options.output or envs.transport_cost_file())
    measured, machine = anyio.run(_measure, options.mib << 20, timeout_s)
    if path is not None:
        store_cost(measured, path, measured_on=machine)
    if options.json:
        stored = None if path is None else str(path)
        print(common.dump({**asdict(measured), "measured_on": machine, "stored": stored}))
    else:
        _print(measured, machine, path)
    return 0


async def _measure(size_bytes: int, timeout_s: float) -> tuple[TransportCost, str]:
    from modelexpress_rl.cli import bench_transport  # NIXL and numpy, only where they are needed

    try:
        with anyio.fail_after(timeout_s):
            return await bench_transport.measure(size_bytes), bench_transport.machine()
    except TimeoutError as error:
        raise DeadlineExceeded(f"reads could not be measured within {timeout_s:g} s") from error


def _print(measured: TransportCost, machine: str, path: Path | None) -> None:
    table = Table(title=f"What reads cost: {machine}", title_justify="left")
    for column in ("constant", "measured", "built in", "what"):
        table.add_column(column, justify="right" if column in ("measured", "built in") else "left")
    for name, meaning in _MEANINGS.items():
        table.add_row(name, *(_text(name, getattr(each, name)) for each in (measured, DEFAULT_COST)), meaning)
    console = common.console()
    console.print(table)
    even = measured.run_s * measured.wire_bytes_per_s
    console.print(f"a run costs as much as {even:,.0f} bytes")
    console.print(
        "not stored" if path is None else f"stored in {path}; generators that start from now on use it"
    )


def _text(name: str, value: float) -> str:
    return f"{value / 2**30:.2f} GiB/s" if name.endswith("bytes_per_s") else f"{value * 1e6:.2f} µs"
