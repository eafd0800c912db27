"""`--seed N` replays one seed with its event log, `--seeds A:B` runs many, `--regenerate` the transcripts.

python -m tests.simulation --seed 4711
python -m tests.simulation --seeds 0:10000 --jobs 8
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback

from tests.simulation import transcript
from tests.simulation.many import command_of, run_seeds
from tests.simulation.planted import BUGS
from tests.simulation.world import Result, simulate


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--seed", type=int, help="replay one seed, with its event log")
    chosen.add_argument("--seeds", type=_seeds, metavar="A:B", help="run the seeds from A to B - 1")
    chosen.add_argument("--regenerate", action="store_true", help="write the transcripts anew")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes for --seeds")
    parser.add_argument("--bug", choices=sorted(BUGS), help="with this bug planted")
    parser.add_argument("--digest", action="store_true", help="of one seed, only the hash of its event log")
    arguments = parser.parse_args()
    if arguments.regenerate:
        for path in transcript.paths():
            path.write_text(transcript.run(path.read_text()))
        return 0
    if arguments.seed is not None:
        return _replay(simulate(arguments.seed, bug=arguments.bug), only_digest=arguments.digest)
    failures = 0
    for result in run_seeds(arguments.seeds, arguments.jobs, arguments.bug):
        if result.violation:
            failures += 1
            print(f"{result.verdict}\n  {command_of(result.seed)}", flush=True)
    print(f"{failures} of {len(arguments.seeds)} seeds failed")
    return failures > 0


def _seeds(text: str) -> range:
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is not A:B with A < B, such as 0:500")
    return range(int(first), int(last))


def _replay(result: Result, *, only_digest: bool) -> int:
    if only_digest:
        print(result.log.digest())
        return 0
    print("\n".join(result.log.lines()))
    print(result.verdict)
    if result.violation is not None and result.violation.cause is not None:
        traceback.print_exception(result.violation.cause)
    return result.violation is not None


if __name__ == "__main__":
    sys.exit(main())
