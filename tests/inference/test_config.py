"""What a generator configuration takes, fills in and refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from modelexpress_rl.errors import UsageError
from modelexpress_rl.inference.config import GeneratorSettings, ModelExpressGeneratorConfig
from modelexpress_rl.object_storage import ObjectStorageGeneratorConfig, ObjectStorageType


class Engine:
    def create_adapter(self) -> Any:
        raise AssertionError("not reached")


ENGINE = Engine()


def settings(**fields: Any) -> GeneratorSettings:
    return GeneratorSettings.of(
        ModelExpressGeneratorConfig(**{"engine_context": ENGINE, "model_name": "m", **fields})
    )


def test_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MODEL_EXPRESS_URL", "MX_SERVER_ADDRESS", "MX_TRANSFER_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    config = ModelExpressGeneratorConfig()
    assert (config.max_transfer_attempts, config.max_replay_chain_length) == (3, 64)
    assert config.rpc_timeout_seconds == 30.0
    filled = settings()
    assert filled.server_url == "localhost:8001"
    assert (filled.lease_ttl_s, filled.registration_ttl_s, filled.transfer_timeout_s) == (30, 90, 900)
    assert len(filled.worker_id) == 8
    assert filled.worker_id != settings().worker_id
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model_name = "other"  # type: ignore[misc]


def test_the_environment_fills_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_NAME", "from-env")
    monkeypatch.setenv("MX_SERVER_ADDRESS", "elsewhere:1")
    monkeypatch.setenv("MX_HEARTBEAT_INTERVAL_SECS", "2")
    filled = settings(model_name=None)
    assert (filled.model_name, filled.server_url, filled.registration_ttl_s) == ("from-env", "elsewhere:1", 6)
    assert filled.server_url_name == "MX_SERVER_ADDRESS"
    assert settings(server_url="here:2").server_url_name == "server_url"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"engine_context": None}, "engine_context"),
        ({"model_name": None}, "MODEL_NAME"),
        ({"model_name": " "}, "model_name"),
        ({"worker_id": " "}, "worker_id"),
        ({"initial_serving_version_id": ""}, "initial_serving_version_id"),
        ({"lease_ttl_seconds": 0}, "lease_ttl_seconds"),
        ({"lease_ttl_seconds": 1.5}, "lease_ttl_seconds"),
        ({"registration_ttl_seconds": -1}, "registration_ttl_seconds"),
        ({"max_transfer_attempts": 0}, "max_transfer_attempts"),
        ({"max_replay_chain_length": True}, "max_replay_chain_length"),
        ({"rpc_timeout_seconds": 0}, "rpc_timeout_seconds"),
        ({"source_order": ["NOWHERE"]}, "source_order"),
        ({"source_order": ["GENERATOR"]}, "only TRAINER"),
        (
            {"object_storage": ObjectStorageGeneratorConfig(ObjectStorageType.S3, "v0", "/seed", "/refits")},
            "object_storage",
        ),
    ],
)
def test_what_is_not_acceptable_is_named(
    fields: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MODEL_NAME", raising=False)
    with pytest.raises(UsageError, match=message):
        settings(**fields)


def test_a_source_order_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MX_GENERATOR_SOURCE_ORDER", "OBJECT_STORAGE")
    with pytest.raises(UsageError, match="MX_GENERATOR_SOURCE_ORDER"):
        settings()
    monkeypatch.setenv("MX_GENERATOR_SOURCE_ORDER", "GENERATOR,TRAINER")
    settings()
