"""What arguments may be, and that a bad one ends its own call and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from modelexpress_rl import arguments
from modelexpress_rl.control import AsyncModelExpressControlClient
from modelexpress_rl.errors import UsageError
from modelexpress_rl.inference.config import GeneratorSettings, ModelExpressGeneratorConfig
from modelexpress_rl.monitor import ReadinessMonitor
from modelexpress_rl.rpc import parse_address, parse_addresses
from modelexpress_rl.train.config import ModelExpressTrainerConfig, TrainerEngineContext
from modelexpress_rl.train.engines.plain import PlainTrainerContext
from modelexpress_rl.train.settings import resolve
from modelexpress_rl.version import WeightPayloadFormat, WeightVersionRef

SURROGATE = "\ud800"
NO_NAMES: list[Any] = ["", "  ", SURROGATE, "a" + SURROGATE, "x" * 2000, 5, None, b"bytes", object()]
NO_SPANS: list[Any] = ["3", None, True, -1, float("nan"), 1j, 1e30]


class Engine:
    def create_adapter(self) -> Any:
        raise AssertionError("not reached")


def trainer(**fields: Any) -> object:
    context: TrainerEngineContext = PlainTrainerContext(slot_id="s")
    given = {"model_name": "m", "device_id": 0, "engine_context": context, **fields}
    return resolve(ModelExpressTrainerConfig(**given))


def generator(**fields: Any) -> object:
    return GeneratorSettings.of(
        ModelExpressGeneratorConfig(**{"model_name": "m", "engine_context": Engine(), **fields})
    )


@pytest.mark.parametrize("value", NO_NAMES, ids=ascii)
def test_what_is_no_name(value: Any) -> None:
    with pytest.raises(UsageError, match=r"^what "):
        arguments.name("what", value)
    with pytest.raises(UsageError, match="version_id"):
        WeightVersionRef(value)


@pytest.mark.parametrize("value", ["a", "foo:shards", "..", "\x00", "☃", "a b", "x" * 1024], ids=ascii)
def test_any_other_text_is_a_name(value: str) -> None:
    assert arguments.name("what", value) is value


def test_messages_stay_short() -> None:
    with pytest.raises(UsageError) as refused:
        arguments.name("what", "y" * 10_000_000)
    assert len(str(refused.value)) < 300


def test_one_string_is_not_a_list_of_its_letters() -> None:
    with pytest.raises(UsageError, match="expected_source_slots must be several strings"):
        arguments.texts("expected_source_slots", "abc")
    with pytest.raises(UsageError, match=r"expected_source_slots\[1\] must be a string, not 5"):
        arguments.texts("expected_source_slots", ["s", 5])


@pytest.mark.parametrize("value", NO_SPANS, ids=str)
def test_what_is_no_span(value: Any) -> None:
    with pytest.raises(UsageError, match="ttl: expected a positive number of seconds"):
        arguments.seconds("ttl", value)


def test_spans_of_zero_and_for_ever_are_asked_for() -> None:
    assert arguments.seconds("ttl", 0, or_zero=True) == 0
    assert arguments.seconds("ttl", float("inf"), or_for_ever=True) == float("inf")
    for bad in (0, float("inf")):
        with pytest.raises(UsageError):
            arguments.seconds("ttl", bad)


def test_a_choice_names_what_there_is() -> None:
    assert arguments.choice(WeightPayloadFormat, "f", "XOR_DELTA") is WeightPayloadFormat.XOR_DELTA
    for bad in ("", "ZIP", 5, None):
        with pytest.raises(UsageError, match="f: expected one of UNSPECIFIED, FULL_TENSOR"):
            arguments.choice(WeightPayloadFormat, "f", bad)


@pytest.mark.parametrize("make", [trainer, generator])
@pytest.mark.parametrize("value", [SURROGATE, 5, b"bytes", object(), "x" * 2000], ids=ascii)
@pytest.mark.parametrize("field", ["model_name", "worker_id"])
def test_clients_take_names_only(make: Callable[..., object], field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=field):
        make(**{field: value})


@pytest.mark.parametrize("parse", [parse_address, parse_addresses])
@pytest.mark.parametrize("value", [5, b"host:1", object(), "host:1" + SURROGATE], ids=ascii)
def test_an_address_is_text(parse: Callable[..., object], value: Any) -> None:
    with pytest.raises(UsageError, match="server_url"):
        parse(value, what="server_url")


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        (trainer, "agent_name", SURROGATE),
        (trainer, "agent_name", 5),
        (trainer, "device_id", "0"),
        (trainer, "device_id", -1),
        (trainer, "device_id", 0.5),
        (trainer, "registration_ttl_seconds", "90"),
        (trainer, "registration_ttl_seconds", float("nan")),
        (trainer, "registration_ttl_seconds", 10**12),
        (trainer, "rpc_timeout_seconds", "30"),
        (trainer, "release_grace_seconds", None),
        (generator, "initial_serving_version_id", SURROGATE),
        (generator, "rpc_timeout_seconds", "30"),
        (generator, "source_order", 5),
        (generator, "engine_context", "an engine"),
    ],
)
def test_a_config_of_another_kind(make: Callable[..., object], field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=field):
        make(**{field: value})


@pytest.mark.anyio
@pytest.mark.parametrize("bad", [SURROGATE, 5, object()], ids=ascii)
async def test_a_control_client_refuses_what_it_can_not_send(bad: Any) -> None:
    async with AsyncModelExpressControlClient.connect("127.0.0.1:1") as control:

        async def refused(field: str, call: Any) -> None:
            with pytest.raises(UsageError, match=field):
                await call

        create = control.create_weight_version
        await refused("model_name", create(bad, "k", "FULL_TENSOR", ["s"]))
        await refused("idempotency_key", create("m", bad, "FULL_TENSOR", ["s"]))
        await refused("payload_format", create("m", "k", bad, ["s"]))
        await refused("expected_source_slots", create("m", "k", "FULL_TENSOR", [bad]))
        await refused("expected_source_slots", create("m", "k", "FULL_TENSOR", bad))
        await refused("base_version_id", create("m", "k", "XOR_DELTA", ["s"], base_version_id=bad))
        await refused("uid", create("m", "k", "FULL_TENSOR", ["s"], uid=bad))
        await refused("state", create("m", "k", "FULL_TENSOR", ["s"], state=bad))
        await refused("version_id", control.get_weight_version(bad))
        await refused("state", control.update_weight_version_state("v", bad))
        await refused("state", control.wait_for_state("v", bad, 1))
        await refused("model_name", control.list_weight_versions(bad))
        await refused("states", control.list_weight_versions("m", [bad]))
        await refused("model_name", control.list_workers(bad))
        await refused("drain_deadline_s", control.release_weight_version("v", -1))
        await refused("drain_deadline_s", control.release_weight_version("v", float("inf")))
        await refused("drain_deadline_s", control.release_weight_version("v", 1e30))
        await refused("timeout", control.wait_for_state("v", "READY", float("nan")))
        with pytest.raises(UsageError, match="model_name"):
            control.watch_model(bad)


@pytest.mark.anyio
@pytest.mark.parametrize("bad", [SURROGATE, 5, ""], ids=ascii)
async def test_a_monitor_refuses_what_it_can_not_send(bad: Any) -> None:
    async with ReadinessMonitor.connect("127.0.0.1:1") as monitor:
        with pytest.raises(UsageError, match="version_id"):
            await monitor.wait_until_ready(bad, 1)
        with pytest.raises(UsageError, match="model_name"):
            await monitor.wait_for_ready_version(bad, 1)
        with pytest.raises(UsageError, match="version_id"):
            monitor.subscribe(print, version_id=bad)
        with pytest.raises(UsageError, match="model_name"):
            monitor.subscribe(print, model_name=bad)
