"""The adapter in one process: what may be bound, wire dtypes, memory that moves, ranks that hold nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

import modelexpress_rl
from modelexpress_rl.column_blocks import ColumnBlocks
from modelexpress_rl.errors import StateError, UsageError
from modelexpress_rl.reshard import manifest as manifests
from modelexpress_rl.train.config import TrainerStagingMode
from modelexpress_rl.train.engines.fsdp import FSDPTrainerContext
from modelexpress_rl.train.reader_columns import ReaderColumns
from modelexpress_rl.train.staging import Stager
from modelexpress_rl.transport.inprocess import Hub
from tests.train.fsdp.support import (
    assemble,
    differing,
    numbered,
    parts_of_boxes,
    parts_of_manifest,
    rank_of,
    sharded,
    staged,
)

pytestmark = pytest.mark.anyio
IN_PLACE, COPY = TrainerStagingMode.IN_PLACE, TrainerStagingMode.COPY_TO_HOST
DEVICE = TrainerStagingMode.COPY_TO_DEVICE


@pytest.fixture(autouse=True)
def _no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


@pytest.fixture
async def stager() -> AsyncIterator[Stager]:
    agent = Hub().agent("trainer")
    made = Stager(agent, with_digests=False)
    yield made
    await made.aclose()


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.norm = torch.nn.BatchNorm1d(2)

    def get_extra_state(self) -> Any:
        return {"not": "weights"}

    def set_extra_state(self, state: Any) -> None:
        pass


class TestBinding:
    def test_a_model_its_state_dict_pairs_or_a_function(self) -> None:
        model = Tiny()
        expected = {name: value for name, value in model.state_dict().items() if name != "_extra_state"}
        ways = [model, model.state_dict(), model.state_dict().items(), model.state_dict, lambda: model]
        for tensors in ways:
            adapter = FSDPTrainerContext(wire_dtype=None).create_adapter()
            assert adapter.bind_tensors(tensors) == "publisher:global-rank:0"
            assert differing(assemble([parts_of_boxes(adapter.boxes())]), expected) == []
            of_context = FSDPTrainerContext(wire_dtype=None, tensors=tensors).create_adapter()
            assert of_context.boxes() == adapter.boxes()
            assert of_context.content() == adapter.content()

    def test_the_slot_is_the_global_rank(self, monkeypatch: pytest.MonkeyPatch) -> None:
        adapter = FSDPTrainerContext(tensors={"w": numbered(2)}).create_adapter()
        monkeypatch.setenv("RANK", "5")
        assert adapter.source_slot_id == "publisher:global-rank:5"
        with rank_of(4, 3):
            assert adapter.source_slot_id == "publisher:global-rank:3"

    def test_nothing_bound_is_refused(self) -> None:
        adapter = FSDPTrainerContext().create_adapter()
        for call in (lambda: adapter.source_slot_id, adapter.boxes, adapter.content):
            with pytest.raises(StateError, match="no tensors are bound"):
                call()

    @pytest.mark.parametrize(
        ("tensors", "problem"),
        [
            (7, "tensors: expected a model, a state dict, pairs .* got int"),
            (torch.zeros(2), "tensors: expected a model, .* got Tensor"),
            ([torch.zeros(2)], r"tensors\[0\]: expected a pair of name and tensor, got Tensor"),
            ({}, "tensors: expected at least one tensor, got none"),
            ({3: torch.zeros(2)}, "tensors: expected names that are strings, got 3"),
            ({"w": "text"}, "tensor 'w': expected a torch tensor, got str"),
            ({"w": torch.zeros(2).to_sparse()}, "tensor 'w': has layout torch.sparse_coo"),
            ({"w": torch.zeros(2, device="meta")}, "tensor 'w': is on device 'meta'"),
            ({"w": torch.zeros(2, dtype=torch.complex64).conj()}, "tensor 'w': is marked as conjugated"),
            ([("w", torch.zeros(2)), ("w", torch.ones(2))], "tensor 'w': is given twice"),
        ],
    )
    def test_refusals(self, tensors: Any, problem: str) -> None:
        with pytest.raises(UsageError, match=problem):
            FSDPTrainerContext().create_adapter().bind_tensors(tensors)

    def test_a_sharded_tensor_of_fsdp1_is_refused(self) -> None:
        class Sharded(torch.Tensor):
            def local_shards(self) -> list[Any]:
                return []

        tensor = torch.zeros(2).as_subclass(Sharded)
        with pytest.raises(UsageError, match="tensor 'w': is a Sharded; expected a DTensor"):
            FSDPTrainerContext().create_adapter().bind_tensors({"w": tensor})

    def test_prefixes_of_wrappers_are_left_out(self) -> None:
        name = "_orig_mod.layers.0._checkpoint_wrapped_module.w"
        context = FSDPTrainerContext(wire_dtype_overrides={name: "float32"})
        adapter = context.create_adapter()
        adapter.bind_tensors({name: numbered(2)})
        assert [box.name for box in adapter.boxes()] == ["layers.0.w"]

    def test_a_tied_tensor_has_both_names(self) -> None:
        tensor = numbered(4, 2)
        adapter = FSDPTrainerContext(wire_dtype=None).create_adapter()
        adapter.bind_tensors({"embed": tensor, "head": tensor})
        assert differing(assemble([parts_of_boxes(adapter.boxes())]), {"embed": tensor, "head": tensor}) == []

    def test_partial_is_refused_by_name(self) -> None:
        with rank_of(2, 0):
            tensor = DTensor.from_local(numbered(4), init_device_mesh("cpu", (2,)), [Partial()])
            with pytest.raises(UsageError, match=r"tensor 'w': is placed as Partial"):
                FSDPTrainerContext().create_adapter().bind_tensors({"w": tensor})

    def test_a_local_tensor_of_another_size_is_refused(self) -> None:
        with rank_of(2, 0):
            mesh = init_device_mesh("cpu", (2,))
            tensor = DTensor.from_local(
                numbered(3), mesh, [Shard(0)], run_check=False, shape=torch.Size([4]), stride=(1,)
            )
            with pytest.raises(UsageError, match=r"tensor 'w': .* leaves \(2,\) to the rank .* holds \(3,\)"):
                FSDPTrainerContext().create_adapter().bind_tensors({"w": tensor})


class TestWireDtypes:
    @pytest.mark.parametrize("mode", [COPY, DEVICE])
    async def test_floating_point_is_cast_while_it_is_copied(
        self, stager: Stager, mode: TrainerStagingMode
    ) -> None:
        tensors = {
            "w": numbered(5, 3),
            "half": numbered(3, dtype=torch.float16),
            "kept": numbered(4),
            "same": numbered(2, 2, dtype=torch.bfloat16),
            "eighth": numbered(4).to(torch.float8_e4m3fn),
            "count": torch.tensor(7),
            "mask": torch.tensor([True, False, True]),
        }
        context = FSDPTrainerContext(wire_dtype_overrides={"kept": torch.float32})
        adapter = context.create_adapter()
        adapter.bind_tensors(tensors)
        for step in range(2):
            tensors["w"].add_(step)
            expected = tensors | {n: tensors[n].bfloat16() for n in ("w", "half")}
            data = await staged(adapter, stager, mode, f"v{step}")
            assert differing(assemble([parts_of_manifest(data)]), expected) == []
            data.buffer_owner.release()

    @pytest.mark.parametrize("wire", ["float16", "torch.float64", torch.float32])
    async def test_any_floating_point_may_be_the_wire_dtype(self, stager: Stager, wire: Any) -> None:
        context = FSDPTrainerContext(wire_dtype=wire, tensors={"w": numbered(5, 3)})
        data = await staged(context.create_adapter(), stager)
        dtype = wire if isinstance(wire, torch.dtype) else getattr(torch, wire.removeprefix("torch."))
        assert differing(assemble([parts_of_manifest(data)]), {"w": numbered(5, 3).to(dtype)}) == []

    async def test_in_place_refuses_a_cast_and_says_what_to_do(self, stager: Stager) -> None:
        context = FSDPTrainerContext(tensors={"w": numbered(2)})
        problem = (
            r"tensor 'w': is torch.float32 and its wire dtype is torch.bfloat16.*use COPY_TO_HOST.*"
            r"wire_dtype=None"
        )
        with pytest.raises(UsageError, match=problem):
            await staged(context.create_adapter(), stager, IN_PLACE)

    async def test_slices_of_one_fused_tensor_share_one_cast(self, stager: Stager) -> None:
        fused = numbered(6, 4)

        def convert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            q, k = tensors["qk"].split(3)
            return {"q": q, "k": k, "kt": k.t(), "norm": tensors["norm"]}

        context = FSDPTrainerContext(
            convert_native_to_hf=convert,
            wire_dtype_overrides={"norm": None, "k": "float32"},
            tensors={"qk": fused, "norm": numbered(3)},
        )
        data = await staged(context.create_adapter(), stager)
        expected = {
            "q": fused[:3].bfloat16(),
            "k": fused[3:],
            "kt": fused[3:].t().bfloat16(),
            "norm": numbered(3),
        }
        assert differing(assemble([parts_of_manifest(data)]), expected) == []

    async def test_a_tied_tensor_is_cast_once(self, stager: Stager) -> None:
        tensor = numbered(4, 3)
        context = FSDPTrainerContext(tensors={"embed": tensor, "head": tensor, "other": numbered(2)})
        adapter = context.create_adapter()
        data = await staged(adapter, stager)
        expected = {"embed": tensor, "head": tensor, "other": numbered(2)}
        wanted = {name: one.bfloat16() for name, one in expected.items()}
        assert differing(assemble([parts_of_manifest(data)]), wanted) == []
        assert [key.native for key in adapter._now().cast_keys] == ["embed", "other"]
        assert len(set(manifests.decode(data.manifest.data).table.addr.tolist())) == 2

    async def test_a_conversions_cast_wins_over_the_default(self, stager: Stager) -> None:
        context = FSDPTrainerContext(
            convert_native_to_hf=lambda t: {"up": t["w"].float(), "w": t["w"]},
            tensors={"w": numbered(4, dtype=torch.float16)},
        )
        data = await staged(context.create_adapter(), stager)
        half = numbered(4, dtype=torch.float16)
        assert (
            differing(assemble([parts_of_manifest(data)]), {"up": half.float(), "w": half.bfloat16()}) == []
        )

    async def test_a_local_tensor_that_is_not_contiguous(self, stager: Stager) -> None:
        tensor = numbered(6, 4).t()[1:3]
        for wire, mode in ((None, IN_PLACE), (None, COPY), ("bfloat16", COPY)):
            context = FSDPTrainerContext(wire_dtype=wire, tensors={"w": tensor})
            data = await staged(context.create_adapter(), stager, mode)
            expected = tensor.bfloat16() if wire else tensor
            assert differing(assemble([parts_of_manifest(data)]), {"w": expected}) == []
            data.buffer_owner.release()

    @pytest.mark.parametrize(
        ("fields", "problem"),
        [
            ({"wire_dtype": "int8"}, "wire_dtype: expected one of torch.float16, .* got 'int8'"),
            (
                {"wire_dtype_overrides": {"w": "x"}},
                r"wire_dtype_overrides\['w'\]: expected one of .* got 'x'",
            ),
            (
                {"wire_dtype_overrides": ["w"]},
                "wire_dtype_overrides: expected names and their dtypes, got list",
            ),
            (
                {"wire_dtype_overrides": {"v": None}},
                "wire_dtype_overrides: 'v' is neither in the state dict nor",
            ),
            (
                {"wire_dtype_overrides": {"count": "float32"}},
                r"wire_dtype_overrides\['count'\]: torch.int64 is not cast to torch.float32",
            ),
            (
                {
                    "wire_dtype_overrides": {"x": "float32"},
                    "convert_native_to_hf": lambda t: {"x": t["w"].half()},
                },
                r"wire_dtype_overrides\['x'\]: convert_native_to_hf makes 'x' torch.float16, expected",
            ),
            (
                {
                    "wire_dtype_overrides": {"x": "float32", "w": "float16"},
                    "convert_native_to_hf": lambda t: {"x": t["w"][:1]},
                },
                "tensor 'x': wire_dtype_overrides of x, w contradict each other: torch.float16, torch.float3",
            ),
        ],
    )
    def test_refusals(self, fields: Any, problem: str) -> None:
        tensors = {"w": numbered(2), "count": torch.tensor(1)}
        with pytest.raises(UsageError, match=problem):
            FSDPTrainerContext(**fields).create_adapter().bind_tensors(tensors)


class TestMemory:
    async def test_a_state_dict_that_is_made_anew_over_the_same_storage_changes_nothing(
        self, stager: Stager
    ) -> None:
        model = Tiny()
        context = FSDPTrainerContext(wire_dtype=None)
        contents, manifests = [], []
        for step in range(3):
            with torch.no_grad():
                model.linear.weight.add_(step)
            adapter = context.create_adapter()
            adapter.bind_tensors(model.state_dict())
            contents.append(adapter.content())
            manifests.append((await staged(adapter, stager, IN_PLACE, f"v{step}")).manifest.digest)
        assert contents[0] == contents[1] == contents[2]
        assert str(contents[0]).startswith("7 tensors, 0 of them cast")
        assert len(set(manifests)) == 1

    @pytest.mark.parametrize("mode", [IN_PLACE, COPY, DEVICE])
    async def test_memory_that_moved_is_followed(self, stager: Stager, mode: TrainerStagingMode) -> None:
        model = Tiny()
        context = FSDPTrainerContext(wire_dtype=None if mode is IN_PLACE else "bfloat16", tensors=model)
        adapter = context.create_adapter()
        contents = []
        for step in range(3):
            model.linear.weight = torch.nn.Parameter(numbered(2, 3, start=10 * step))
            data = await staged(adapter, stager, mode, f"v{step}")
            contents.append(adapter.content())
            got = assemble([parts_of_manifest(data)])["linear.weight"]
            assert differing({"w": got}, {"w": numbered(2, 3, start=10 * step).to(got.dtype)}) == []
            data.buffer_owner.release()
        assert contents[0] != contents[1] != contents[2]

    def test_freed_memory_is_named(self) -> None:
        tensor = numbered(4)
        adapter = FSDPTrainerContext(wire_dtype=None).create_adapter()
        adapter.bind_tensors({"w": tensor})
        tensor.untyped_storage().resize_(0)
        with pytest.raises(StateError, match=r"tensor 'w': its memory was freed or shrunk: .* 0 bytes"):
            adapter.boxes()

    async def test_casts_of_two_captures_at_once_are_apart(self, stager: Stager) -> None:
        context = FSDPTrainerContext(tensors={"w": numbered(2)})
        adapter = context.create_adapter()
        first = adapter._take_buffers(adapter._now().cast_keys)
        second = adapter._take_buffers(adapter._now().cast_keys)
        assert first is not second
        packs = Stager(Hub().agent("a"), with_digests=False, columns=ReaderColumns(ColumnBlocks.of(2)))
        data = await staged(adapter, packs)
        [kept] = context.kept.spare
        data.buffer_owner.release()
        await staged(adapter, packs, version="v2")
        assert list(context.kept.spare) == [kept]
        await packs.aclose()

    @pytest.mark.parametrize("mode", [COPY, DEVICE])
    async def test_casts_go_straight_into_the_memory_that_is_read_unless_columns_are_packed(
        self, mode: TrainerStagingMode
    ) -> None:
        weight = numbered(32, 64)
        for rules, keeps_buffers in (({}, False), ({"w": 2}, True)):
            context = FSDPTrainerContext(tensors={"w": weight, "same": numbered(3).bfloat16()})
            columns = ReaderColumns(ColumnBlocks.of(rules))
            stager = Stager(Hub().agent("a"), with_digests=False, columns=columns)
            adapter = context.create_adapter()
            for step in range(2):
                weight.add_(step)
                data = await staged(adapter, stager, mode, f"v{step}")
                expected = {"w": weight.bfloat16(), "same": numbered(3).bfloat16()}
                assert differing(assemble([parts_of_manifest(data)]), expected) == []
                data.buffer_owner.release()
            assert bool(context.kept.spare) is keeps_buffers
            await stager.aclose()


class TestNothing:
    @pytest.mark.parametrize("mode", [IN_PLACE, COPY, DEVICE])
    async def test_a_rank_that_holds_nothing_publishes_that(
        self, stager: Stager, mode: TrainerStagingMode
    ) -> None:
        with rank_of(2, 1):
            tensor = sharded(numbered(1, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
            context = FSDPTrainerContext(wire_dtype=None, tensors={"w": tensor})
            data = await staged(context.create_adapter(), stager, mode)
        [part] = parts_of_manifest(data)
        assert (part.name, part.full_shape, part.offset, part.shape) == ("w", (1, 3), (1, 0), (0, 3))
        assert data.manifest.total_bytes == 0

    async def test_a_rank_outside_of_the_mesh(self, stager: Stager) -> None:
        with rank_of(3, 2):
            mesh = torch.distributed.device_mesh.DeviceMesh("cpu", [0, 1])
            tensor = sharded(numbered(4), mesh, [Shard(0)])
            context = FSDPTrainerContext(tensors={"w": tensor, "own": numbered(2)})
            data = await staged(context.create_adapter(), stager)
            assert [part.name for part in parts_of_manifest(data)] == ["own"]

    def test_an_empty_tensor_is_published(self) -> None:
        adapter = FSDPTrainerContext().create_adapter()
        adapter.bind_tensors({"none": torch.zeros(0, 4), "w": numbered(2, dtype=torch.bfloat16)})
        assert [(box.name, box.shape) for box in adapter.boxes()] == [("none", (0, 4)), ("w", (2,))]


def test_it_is_exported_and_importing_it_loads_no_torch() -> None:
    assert modelexpress_rl.FSDPTrainerContext is FSDPTrainerContext
    code = (
        "import sys; from modelexpress_rl import FSDPTrainerContext as C; C(); "
        "print(sorted({'torch', 'nixl'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
