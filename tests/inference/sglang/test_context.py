"""An SGLang model takes versions within SGLang's own steps; against a double of its loader."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modelexpress_rl import SglangGeneratorContext
from modelexpress_rl.errors import GeometryError, StateError, UsageError
from tests.inference.capture.support import published, staged, state
from tests.inference.publisher import Held, create_version
from tests.inference.sglang.double import (
    DefaultModelLoader,
    Derives,
    Model,
    Packs,
    install,
    loaded,
    runner,
    tensors,
)
from tests.inference.world import World, halves


@pytest.fixture(autouse=True)
def _sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def refitted(model: Model, step: int, **options: Any) -> int:
    """Refit once; answers how many bytes were read. Nothing is touched before the install."""
    version = tensors(step)
    loader = SglangGeneratorContext(runner(model), **options).create_adapter().loader(published(version))
    boxes = [staged(need, version) for need in loader.needs]
    before = state(model)
    loader.check(boxes)
    assert state(model) == before
    DefaultModelLoader.calls.clear()
    loader.install(boxes)
    return sum(box.data.size for box in boxes)


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_each_rank_reads_what_it_loads_and_keeps_its_addresses(tp_rank: int) -> None:
    model, reference = loaded(Model(tp_rank, 2), 1), loaded(Model(tp_rank, 2), 2)
    addresses = {name: each.data_ptr() for name, each in model.named_parameters()}
    read = refitted(model, 2)
    assert read == sum(each.nbytes for each in model.parameters())
    assert {name: each.data_ptr() for name, each in model.named_parameters()} == addresses
    for name, each in reference.named_parameters():
        assert torch.equal(model.get_parameter(name), each), name
    assert DefaultModelLoader.calls == ["restore", "process"]


def test_what_a_model_derives_at_the_end_of_loading_is_derived_anew() -> None:
    model, reference = loaded(Derives(), 1), loaded(Derives(), 2)
    assert isinstance(model, Derives)
    assert isinstance(reference, Derives)
    before = model.absorbed
    refitted(model, 2)
    assert model.absorbed is not before
    assert model.absorbed is not None
    assert torch.equal(model.absorbed, reference.absorbed)  # type: ignore[arg-type]


@pytest.mark.parametrize("says", ["the model", "the runner", "the caller"])
def test_a_packed_model_is_unpacked_loaded_and_packed_again(says: str) -> None:
    model, reference = loaded(Model(quant_config=Packs()), 1), loaded(Model(quant_config=Packs()), 2)
    options: dict[str, Any] = {}
    made = runner(model)
    if says != "the model":
        model.quant_config = None
        made.model_config = SimpleNamespace(quantization="packs" if says == "the runner" else None)
        options["load_weights_whole"] = says == "the caller"
    version = tensors(2)
    loader = SglangGeneratorContext(made, **options).create_adapter().loader(published(version))
    boxes = [staged(need, version) for need in loader.needs]
    loader.check(boxes)
    DefaultModelLoader.calls.clear()
    loader.install(boxes)
    assert model.qkv_proj.weight.dtype is torch.int8
    assert torch.equal(model.qkv_proj.weight, reference.qkv_proj.weight)
    assert torch.equal(model.qkv_proj.scale, reference.qkv_proj.scale)
    assert DefaultModelLoader.calls == ["restore", "load on cpu", "process"]


def test_an_install_that_fails_leaves_the_model_packed_as_it_runs() -> None:
    model = loaded(Model(quant_config=Packs()), 1)
    version = tensors(2)
    loader = SglangGeneratorContext(runner(model)).create_adapter().loader(published(version))
    boxes = [staged(need, version) for need in loader.needs]

    def broken(_weights: Any) -> None:
        raise RuntimeError("the loader broke")

    model.load_weights = broken  # type: ignore[assignment, method-assign]
    with pytest.raises(RuntimeError, match="the loader broke"):
        loader.install(boxes)
    assert model.qkv_proj.weight.dtype is torch.int8


def test_an_older_loader_has_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    class Older:
        load_weights_and_postprocess = staticmethod(DefaultModelLoader.load_weights_and_postprocess)

    install(monkeypatch, Older)
    for whole in (False, True):
        model, reference = loaded(Model(), 1), loaded(Model(), 2)
        refitted(model, 2, load_weights_whole=whole)
        assert torch.equal(model.qkv_proj.weight, reference.qkv_proj.weight)
        assert DefaultModelLoader.calls == ["load on cpu", "process"]


class TestRefusals:
    def test_what_is_no_model_runner(self) -> None:
        for made in (object(), SimpleNamespace(model=torch.nn.Linear(2, 2), device="cpu")):
            with pytest.raises(UsageError, match="expected SGLang's ModelRunner with its model loaded"):
                SglangGeneratorContext(made)
        with pytest.raises(UsageError, match="has no device"):
            SglangGeneratorContext(SimpleNamespace(model=Model()))

    def test_no_sglang_and_one_of_another_kind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        context = SglangGeneratorContext(runner(Model()))
        install(monkeypatch, object)
        with pytest.raises(UsageError, match=r"0\.5 is known to work"):
            context.create_adapter()
        monkeypatch.setitem(sys.modules, "sglang.srt.model_loader.loader", None)
        with pytest.raises(UsageError, match="sglang: expected it to be importable"):
            context.create_adapter()

    def test_names_where_whole_tensors_are_loaded(self) -> None:
        context = SglangGeneratorContext(runner(Model(quant_config=Packs())), frozen={"norm.weight"})
        with pytest.raises(UsageError, match="frozen, aliases: the model is loaded by whole tensors"):
            context.create_adapter()

    def test_a_model_that_computes_with_other_values_than_its_parameters(self) -> None:
        model = loaded(Model(), 1)
        adapter = SglangGeneratorContext(runner(model)).create_adapter()
        loader = adapter.loader(published(tensors(2)))
        model.qkv_proj._derived_weight_cache_error = "splits are cached"  # type: ignore[assignment]
        with pytest.raises(UsageError, match=r"layer 'qkv_proj' of Model can't be updated: splits are"):
            adapter.loader(published(tensors(2)))
        with pytest.raises(UsageError, match="splits are cached"):
            loader.check([])
        del model.qkv_proj._derived_weight_cache_error
        model.norm.use_intel_amx_backend = True  # type: ignore[assignment]
        with pytest.raises(UsageError, match="layer 'norm' of Model is packed for AMX"):
            adapter.loader(published(tensors(2)))

    def test_weights_that_other_processes_share(self) -> None:
        def shared(what: str) -> None:
            raise RuntimeError(f"{what} is not supported while the weight cache is active")

        made = runner(Model(), weight_updater=SimpleNamespace(_assert_weight_cache_inactive=shared))
        with pytest.raises(UsageError, match="can't be updated: a refit is not supported while"):
            SglangGeneratorContext(made).create_adapter().loader(published(tensors(1)))

    def test_a_packed_model_that_is_not_said_to_be(self) -> None:
        """The parameter has another shape than what is loaded: no copy, and the way out is named."""
        model = loaded(Model(quant_config=Packs()), 1)
        model.quant_config = None
        with pytest.raises(GeometryError, match="load_weights"):
            SglangGeneratorContext(runner(model)).create_adapter().loader(published(tensors(2)))

    def test_boxes_of_another_loader(self) -> None:
        loader = SglangGeneratorContext(runner(Model())).create_adapter().loader(published(tensors(1)))
        with pytest.raises(StateError, match="not those that this loader asked for"):
            loader.check([])


@pytest.mark.anyio
async def test_two_ranks_are_refitted_by_two_trainer_ranks(world: World) -> None:
    models = [Model(tp_rank, 2) for tp_rank in (0, 1)]
    clients = [
        await world.generator(model, worker_id=f"g{rank}", context=SglangGeneratorContext(runner(model)))
        for rank, model in enumerate(models)
    ]
    trainers = [await world.trainer(f"t{part}") for part in (0, 1)]
    for step in (1, 2):
        version = {name: tensor.numpy() for name, tensor in tensors(step).items()}
        norm = version.pop("norm.weight")
        await create_version(world.control, f"v{step}", ["s0", "s1"])
        for part, trainer in enumerate(trainers):
            whole = [Held("norm.weight", norm, (0, 0), norm.shape)] if part == 0 else []
            await trainer.publish(f"v{step}", f"s{part}", [*halves(version, part), *whole])
        for rank, (model, client) in enumerate(zip(models, clients, strict=True)):
            await client.apply_weight(await client.stage_weight(f"v{step}"))
            assert torch.equal(model.qkv_proj.weight, loaded(Model(rank, 2), step).qkv_proj.weight)
            assert torch.equal(model.norm.weight, tensors(step)["norm.weight"])
