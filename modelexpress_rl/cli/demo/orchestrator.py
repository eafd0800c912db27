"""The demo's orchestrator: starts every process, asks for a step at a time, and judges the proofs."""

from __future__ import annotations

import json
import socket
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import grpc
from anyio.abc import TaskGroup
from rich.console import Console

from modelexpress_rl.cli.demo.options import DemoOptions
from modelexpress_rl.cli.demo.peers import Peer, Peers, StepFailed
from modelexpress_rl.cli.demo.processes import Child, ProcessDied
from modelexpress_rl.cli.demo.report import Board, StepReport
from modelexpress_rl.cli.demo.wires import SOCKET_VARIABLE
from modelexpress_rl.control import AsyncModelExpressControlClient
from modelexpress_rl.errors import ModelExpressError, TryAgainError
from modelexpress_rl.version import WeightPayloadFormat

MODEL_NAME = "demo"
TRAINER_RANKS = 2
GENERATORS = (1, 4)
START_TIMEOUT_S = 120.0
LEASE_TTL_S = 20
ATTEMPTS = 4


class Orchestrator:
    """One run of the demo."""

    def __init__(self, options: DemoOptions, console: Console) -> None:
        self._options = options
        self._board = Board(console)
        self._run = uuid.uuid4().hex[:8]
        self._children: list[Child] = []
        self._slots: list[str] = []
        self._losses: dict[int, float] = {}
        self._ending = False

    async def run(self) -> bool:
        """Run every step; returns whether each one was proven."""
        with tempfile.TemporaryDirectory(prefix="mx-rl-demo-") as folder, self._board:
            try:
                async with anyio.create_task_group() as group:
                    await self._run_in(Path(folder), group)
                    group.cancel_scope.cancel()
            except* ProcessDied as died:
                self._board.say(f"[red]{died.exceptions[0]}[/red]")
        return self._judge()

    async def _run_in(self, folder: Path, group: TaskGroup) -> None:
        peers = Peers(folder / "socket", lambda peer: self._board.say(f"  {peer.name} is up"))
        await group.start(peers.accept)
        try:
            server = await self._start_server(folder, group)
            await self._start_ranks(folder, server, peers.path, group)
            with anyio.move_on_after(START_TIMEOUT_S) as waiting:
                await peers.wait_for(TRAINER_RANKS, len(GENERATORS))
            if waiting.cancelled_caught:
                raise ProcessDied(f"not every process was up after {START_TIMEOUT_S:.0f} s; {self._tails()}")
            self._slots = sorted({peer.hello["slot"] for peer in peers.trainers})
            async with _control(server) as control:
                await self._run_steps(control, peers, folder, group)
            self._ending = True
            await peers.stop()
        finally:
            self._ending = True
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as ending:
                    for child in reversed(self._children):
                        ending.start_soon(child.end, 0.0 if child.name == "control plane" else 10.0)

    async def _start_server(self, folder: Path, group: TaskGroup) -> str:
        if self._options.server:
            self._board.say(f"using the control plane at {self._options.server}")
            return self._options.server
        port = _free_port()
        arguments = ["serve", "--host", "127.0.0.1", "--port", str(port), "--store", self._options.store]
        # Where a store comes back empty, a fence waits for the longest lease that it may have granted.
        arguments += ["--max-lease-ttl", f"{LEASE_TTL_S}s"]
        child = Child("control plane", ["modelexpress_rl.cli.main", *arguments], folder / "server.log")
        self._children.append(child)
        await child.start()
        await self._until_served(child)
        group.start_soon(self._keep_serving, child)
        assert child.process is not None
        store, process = self._options.store, child.process.pid
        self._board.say(f"control plane at 127.0.0.1:{port}, store {store}, process {process}")
        return f"127.0.0.1:{port}"

    async def _until_served(self, child: Child) -> None:
        with anyio.move_on_after(START_TIMEOUT_S):
            while "listening on" not in child.tail():
                await anyio.sleep(0.05)
                if not child.running:
                    break
            else:
                return
        raise ProcessDied(f"the control plane does not start:\n{child.tail()}")

    async def _keep_serving(self, child: Child) -> None:
        """A control plane may be killed at any time: it is started again on the same store."""
        while True:
            code = await child.wait()
            if self._ending:
                return
            self._board.say(f"[yellow]the control plane ended ({code}); starting it again[/yellow]")
            await child.start()

    async def _start_ranks(self, folder: Path, server: str, path: Path, group: TaskGroup) -> None:
        sizes = ["--sizes", json.dumps(self._options.model_arguments()), "--server", server]
        environment = {SOCKET_VARIABLE: str(path), "OMP_NUM_THREADS": "1", "MX_WORKER_HOST": "127.0.0.1"}
        rank = ["modelexpress_rl.cli.demo.trainer", "--trainer", self._options.trainer, *sizes]
        rank += ["--mode", self._options.mode]
        torchrun = ["torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(TRAINER_RANKS)]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", *rank]
        children = [Child("trainer", torchrun, folder / "trainer.log", environment)]
        for tp in GENERATORS:
            generator = ["modelexpress_rl.cli.demo.generator", "--tp", str(tp), *sizes]
            generator += ["--lease-ttl", str(LEASE_TTL_S)]
            children.append(
                Child(f"generator TP {tp}", generator, folder / f"generator-{tp}.log", environment)
            )
        for child in children:
            self._children.append(child)
            await child.start()
            group.start_soon(self._must_live, child)

    async def _must_live(self, child: Child) -> None:
        code = await child.wait()
        if not self._ending:
            raise ProcessDied(f"{child.name} ended with exit code {code}:\n{child.tail()}")

    async def _run_steps(
        self, control: AsyncModelExpressControlClient, peers: Peers, folder: Path, group: TaskGroup
    ) -> None:
        trained = False
        for number in range(1, self._options.steps + 1):
            step = StepReport(number, f"{self._run}-{number}")
            self._board.steps.append(step)
            try:
                with anyio.fail_after(self._options.step_timeout_s):
                    trained = await self._step(control, peers, folder, group, step, trained)
            except (ModelExpressError, grpc.RpcError, TimeoutError) as failure:
                step.error = str(failure) or f"took longer than {self._options.step_timeout_s:.0f} s"
                self._board.say(f"[red]step {number}: {step.error}[/red]")
                trained = False
                if not self._options.keep_going:
                    return
            finally:
                self._board.finished(step)

    async def _step(
        self,
        control: AsyncModelExpressControlClient,
        peers: Peers,
        folder: Path,
        group: TaskGroup,
        step: StepReport,
        trained: bool,
    ) -> bool:
        """One version, from training to reuse; returns whether the next step has been trained already."""
        await self._create(control, step)
        watching = anyio.CancelScope()
        group.start_soon(self._watch, control, step, watching)
        reference = folder / f"reference-{step.step}.pt"
        try:
            return await self._move(control, peers, folder, step, reference, trained)
        finally:
            watching.cancel()
            reference.unlink(missing_ok=True)

    async def _move(
        self,
        control: AsyncModelExpressControlClient,
        peers: Peers,
        folder: Path,
        step: StepReport,
        reference: Path,
        trained: bool,
    ) -> bool:
        if not trained:
            step.doing = "training"
            await self._train(peers, step.step, reference)
        step.loss = self._losses.pop(step.step)
        step.doing = "publishing"
        published = await self._publish(control, peers, step)
        ahead = self._options.mode != "IN_PLACE" and step.step < self._options.steps
        async with anyio.create_task_group() as side:
            if ahead:  # the copy is what is read: training goes on
                following = step.step + 1
                side.start_soon(self._train, peers, following, folder / f"reference-{following}.pt")
            step.doing = "refitting"
            await self._refit(peers, step, reference)
        step.doing = "releasing"
        await self._release(control, step)
        reusable = await _ask_all(peers.trainers, "release", "reusable", version=step.version)
        in_place = self._options.mode == "IN_PLACE"
        step.stall_s = max(
            answer["stall_s"] if in_place else answer["published_s"]
            for answer in (reusable if in_place else published)
        )
        with anyio.move_on_after(2.0):
            await step.retired.wait()
        return ahead

    async def _create(self, control: AsyncModelExpressControlClient, step: StepReport) -> None:
        step.created = step.created or time.perf_counter()
        await control.create_weight_version(
            MODEL_NAME,
            f"demo-{step.version}",
            WeightPayloadFormat.FULL_TENSOR,
            expected_source_slots=self._slots,
            uid=step.version,
        )

    async def _publish(
        self, control: AsyncModelExpressControlClient, peers: Peers, step: StepReport
    ) -> list[dict[str, Any]]:
        """Have every rank publish; a version that was lost meanwhile is created and published again."""
        for _ in range(ATTEMPTS - 1):
            try:
                return await _ask_all(peers.trainers, "publish", "published", version=step.version)
            except StepFailed as failure:
                self._board.say(f"[yellow]{failure}; trying again[/yellow]")
                await self._create(control, step)
        return await _ask_all(peers.trainers, "publish", "published", version=step.version)

    async def _release(self, control: AsyncModelExpressControlClient, step: StepReport) -> None:
        """Release the version; one that was lost is created and published again first."""
        while not step.released:
            try:
                await control.delete_weight_version(step.version)
                step.released = True
            except grpc.RpcError as failure:
                if failure.code() is not grpc.StatusCode.NOT_FOUND:
                    raise
                await self._create(control, step)
                await control.wait_for_state(step.version, "READY", timeout=self._options.step_timeout_s)

    async def _train(self, peers: Peers, step: int, reference: Path) -> None:
        answers = await _ask_all(peers.trainers, "train", "trained", step=step, reference=str(reference))
        self._losses[step] = answers[0]["loss"]

    async def _refit(self, peers: Peers, step: StepReport, reference: Path) -> None:
        async def one(index: int) -> None:
            peer = peers.generators[index]
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    answer = await peer.ask(
                        "refit", "refitted", version=step.version, reference=str(reference)
                    )
                    break
                except StepFailed as failure:
                    if attempt == ATTEMPTS:
                        raise
                    self._board.say(f"[yellow]{failure}; trying again[/yellow]")
                    await anyio.sleep(0.5)
            for rank in answer["ranks"]:
                metrics = rank["metrics"]
                step.proofs.append(rank)
                step.wire_s = max(step.wire_s, metrics.get("wire_transfer_s", 0.0))
                step.refit_s = max(step.refit_s, rank["refit_s"])
                step.wire_bytes += int(metrics.get("bytes", 0))

        async with anyio.create_task_group() as refitting:
            for index in range(len(peers.generators)):
                refitting.start_soon(one, index)

    async def _watch(
        self, control: AsyncModelExpressControlClient, step: StepReport, scope: anyio.CancelScope
    ) -> None:
        """Note each state; a version that a control plane with an empty store forgot is created again."""
        with scope:
            while True:
                try:
                    await self._note_states(control, step)
                except TryAgainError:
                    continue
                except grpc.RpcError as failure:
                    if failure.code() is not grpc.StatusCode.NOT_FOUND:
                        return
                if step.released:
                    return
                step.saw("LOST")
                self._board.say(f"[yellow]step {step.step}: its version was lost; creating it again[/yellow]")
                await self._create(control, step)

    async def _note_states(self, control: AsyncModelExpressControlClient, step: StepReport) -> None:
        async for status in control.watch(step.version):
            if str(status.state) != "FORGOTTEN" or step.released:
                step.saw(str(status.state))

    def _judge(self) -> bool:
        board = self._board
        board.console.print(board.table())
        proven = [step for step in board.steps if step.proven]
        everything = len(proven) == self._options.steps
        ranks = sum(GENERATORS)
        if everything:
            board.say(
                f"[green]Proven: after each of {len(proven)} steps, all {ranks} generator ranks held the "
                "trainer's weights of that step, byte for byte, and every parameter differed from the step "
                "before.[/green]"
            )
        else:
            board.say(f"[red]Not proven: {len(proven)} of {self._options.steps} steps hold.[/red]")
        return everything

    def _tails(self) -> str:
        return "\n".join(f"{child.name}:\n{child.tail()}" for child in self._children)


@asynccontextmanager
async def _control(server: str) -> AsyncIterator[AsyncModelExpressControlClient]:
    async with AsyncModelExpressControlClient.connect(server_url=server) as control:
        yield control


async def _ask_all(peers: list[Peer], command: str, answer: str, **arguments: Any) -> list[dict[str, Any]]:
    """Ask all of them side by side, and wait for every one, also where another fails."""
    answers: list[dict[str, Any]] = [{}] * len(peers)
    failures: list[str] = []

    async def one(index: int) -> None:
        try:
            answers[index] = await peers[index].ask(command, answer, **arguments)
        except StepFailed as failure:
            failures.append(str(failure))

    async with anyio.create_task_group() as group:
        for index in range(len(peers)):
            group.start_soon(one, index)
    if failures:
        raise StepFailed("; ".join(sorted(failures)))
    return answers


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
