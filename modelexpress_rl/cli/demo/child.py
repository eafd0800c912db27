"""Runs a module as a child of the demo that never outlives it: `python -m ...child MODULE ARGUMENTS`.

The demo ends its children, and their process groups. That does not help where the demo itself is killed,
nor with the ranks of torchrun, which are in sessions of their own and may be stopped.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Be killed when the parent process ends, however it ends and whatever this process does then.

    Only Linux knows how; elsewhere this does nothing.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before it was asked for
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    die_with_parent()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
