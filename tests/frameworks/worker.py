"""One rank of every framework's trainer: `python -m tests.frameworks.worker SOCKET FOLDER URL`.

The calls come from the tests, as Ray's or a launcher's would; one pair of processes serves all tests.
"""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from modelexpress_rl import ModelExpressGeneratorClient, ModelExpressGeneratorConfig, SglangGeneratorContext
from modelexpress_rl.cli.demo import model as demo
from modelexpress_rl.frameworks.trl import ModelExpressWeightTransfer
from modelexpress_rl.inference.engines.sglang import update_all_ranks
from tests.frameworks import nemo_rl, prime_rl, slime, trl, verl
from tests.frameworks.actors import serve
from tests.frameworks.policy import Trained
from tests.inference.sglang import double


class Worker:
    """What a rank may be told to do."""

    def __init__(self, folder: Path, server_url: str) -> None:
        self._folder, self._server_url = folder, server_url
        self._fsdp: Trained | None = None
        self._slime: slime.WeightUpdater | None = None
        self._trl: trl.Trainer | None = None
        self._verl: verl.Actor | None = None
        self._nemo_rl = nemo_rl.PolicyActor(server_url)

    def join(self) -> None:
        """Make the process groups, torch's and Megatron's; once."""
        if dist.is_initialized():
            return
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", f"file://{self._folder / 'ranks'}", rank=rank, world_size=size)
        demo.initialize_parallel()

    def nemo_rl(self, method: str, *arguments: Any) -> Any:
        """A call of NeMo-RL's actor."""
        return getattr(self._nemo_rl, method)(*arguments)

    def slime(self, method: str, *arguments: Any) -> Any:
        """A call of slime's updater, made when it is first needed."""
        if self._slime is None:
            self._slime = slime.WeightUpdater(self._server_url)
        return getattr(self._slime, method)(*arguments)

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

    def train(self, step: int) -> dict[str, torch.Tensor]:
        """One step of the FSDP2 model; answers all weights."""
        self.fsdp.step(step)
        return self.fsdp.whole()

    def begin_trl(self, url: str, model_name: str) -> None:
        """Make TRL's trainer, and connect it."""
        transfer = ModelExpressWeightTransfer(url, model_name, server_url=self._server_url)
        self._trl = trl.Trainer(self.fsdp.model, transfer)
        self._trl.begin()

    def train_like_trl(self, step: int) -> tuple[dict[str, torch.Tensor], str | None]:
        """One step, synced; answers all weights, and why they could not be synced."""
        assert self._trl is not None
        weights = self.train(step)
        try:
            self._trl.sync_weight()
        except Exception as error:  # noqa: BLE001 (TRL's own to judge)
            return weights, f"{type(error).__name__}: {error}"
        return weights, None

    def end_trl(self) -> None:
        """Disconnect."""
        assert self._trl is not None
        self._trl.end()

    def start_sglang(self, model_name: str) -> None:
        """Be one rank of an SGLang engine: a double of its loader, and a model of two ranks."""
        double.install(pytest.MonkeyPatch())
        self._sglang = double.Model(dist.get_rank(), dist.get_world_size())
        self._sglang_client = ModelExpressGeneratorClient.initialize(
            ModelExpressGeneratorConfig(
                engine_context=SglangGeneratorContext(double.runner(self._sglang)),
                model_name=model_name,
                server_url=self._server_url,
            )
        )

    def update_sglang(self, version_id: str, broken_rank: int, broken: str) -> dict[str, Any]:
        """Update the engine; a rank that is broken can't stage it, or can't install it."""
        process = double.DefaultModelLoader.postprocess_weights
        if dist.get_rank() == broken_rank and broken == "stage":
            version_id = "sglang:unknown"
        elif dist.get_rank() == broken_rank and broken == "install":
            double.DefaultModelLoader.postprocess_weights = None  # type: ignore[assignment]
        error = None
        try:
            update_all_ranks(self._sglang_client, version_id, dist.group.WORLD)
        except Exception as failure:  # noqa: BLE001 (it is what is asked for)
            error = f"{type(failure).__name__}: {failure}"
        double.DefaultModelLoader.postprocess_weights = staticmethod(process)  # type: ignore[assignment]
        return {
            "error": error,
            "serving": self._sglang_client.serving_version_id,
            "weight": self._sglang.qkv_proj.weight.detach().clone(),
        }

    def stop_sglang(self) -> None:
        """Leave the control plane."""
        self._sglang_client.close()

    def verl(self, method: str, *arguments: Any) -> Any:
        """A call of verl's actor; `join` takes the arguments of all ranks."""
        rank = dist.get_rank()
        if self._verl is None:
            self._verl = verl.Actor(self._server_url, self.fsdp.model, rank)
        if method == "join":
            own = {name: each[rank] for name, each in arguments[0].items()}
            return self._verl.execute("init_process_group", own)
        return getattr(self._verl, method)(*arguments)


def main(socket: str, folder: str, server_url: str) -> None:
    torch.set_num_threads(1)
    with Client(socket) as connection:
        connection.send(int(os.environ["RANK"]))
        serve(connection, Worker(Path(folder), server_url))


if __name__ == "__main__":
    main(*sys.argv[1:])
