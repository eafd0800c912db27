"""`python -m tests.simulation --seed N`: replay one seed; `--seeds A:B`: run many."""

from __future__ import annotations

import argparse
import sys
import traceback

from tests.simulation.world import Result, simulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--seed", type=int, help="replay one seed, with its event log")
    chosen.add_argument("--seeds", help="A:B, run the seeds from A to B - 1")
    parser.add_argument("--quiet", action="store_true", help="of one seed, only the verdict")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        result = simulate(arguments.seed)
        if not arguments.quiet:
            print("\n".join(result.log.lines()))
        print(_verdict(result))
        if result.violation is not None and result.violation.cause is not None:
            traceback.print_exception(result.violation.cause)
        return result.violation is not None
    first, _, last = arguments.seeds.partition(":")
    failed = 0
    for seed in range(int(first), int(last)):
        result = simulate(seed)
        if result.violation is not None:
            failed += 1
            print(_verdict(result), f"\n  python -m tests.simulation --seed {seed}", flush=True)
    print(f"{failed} of {int(last) - int(first)} seeds failed")
    return failed > 0


def _verdict(result: Result) -> str:
    words = "all promises held" if result.violation is None else str(result.violation)
    return (
        f"seed {result.seed}: {words} ({result.virtual_s:.1f} s virtual, {result.wall_s:.2f} s, "
        f"{result.served} versions, {result.commits} commits, {result.callbacks} callbacks, "
        f"{len(result.log)} events)"
    )


if __name__ == "__main__":
    sys.exit(main())
