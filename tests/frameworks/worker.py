"""One rank of every framework's trainer: `python -m tests.frameworks.worker SOCKET FOLDER URL`.

The calls come from the tests, as Ray's or a launcher's would; one pair of processes serves all tests.
"""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.frameworks import prime_rl
from tests.frameworks.actors import serve
from tests.frameworks.policy import Trained


class Worker:
    """What a rank may be told to do."""

    def __init__(self, folder: Path, server_url: str) -> None:
        self._folder, self._server_url = folder, server_url
        self._fsdp: Trained | None = None

    def join(self) -> None:
        """Make the process group."""
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", f"file://{self._folder / 'ranks'}", rank=rank, world_size=size)

    @property
    def fsdp(self) -> Trained:
        """The FSDP2 model, made when it is first needed."""
        if self._fsdp is None:
            self._fsdp = Trained(dist.get_world_size())
        return self._fsdp

    def train_like_prime_rl(self, steps: int, mode: str) -> list[dict[str, Any]]:
        """A training loop that broadcasts after every step, and at last where nobody looks in time."""
        sender = prime_rl.Sender(self._folder / "prime", self._server_url, mode)
        said = []
        for step in range(1, steps + 1):
            self.fsdp.step(step)
            whole = self.fsdp.whole()
            if dist.get_rank() == 0:
                torch.save(whole, self._folder / f"prime-{step}.pt")
            look_again = self._folder / "look-again" if step == steps else None
            said.append(sender.broadcast(self.fsdp.model, step, look_again))
        sender.close()
        return said


def main(socket: str, folder: str, server_url: str) -> None:
    torch.set_num_threads(1)
    with Client(socket) as connection:
        connection.send(int(os.environ["RANK"]))
        serve(connection, Worker(Path(folder), server_url))


if __name__ == "__main__":
    main(*sys.argv[1:])
