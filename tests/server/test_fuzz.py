"""Any request at all: an answer or a refusal in words, never a fault of the server."""

from __future__ import annotations

from typing import Any

import anyio
import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.server.app import CONTROL, REFIT
from tests.server.api import GENERATOR, Server

pytestmark = pytest.mark.anyio

METHODS = [
    method
    for service in (
        refit.DESCRIPTOR.services_by_name["RefitService"],
        v1.DESCRIPTOR.services_by_name["RefitControlService"],
    )
    for method in service.methods
]
ANSWERS = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
}
# Often enough what exists, so that the requests get further than the first check.
TEXT = st.sampled_from(["v", "t0", "g", "s0", "org/model", "key of v", "", " ", "\0", "W10=", "s3://b/k"]) | (
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
)
NUMBERS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_UINT32: st.sampled_from([0, 1, 30, 2**31, 2**32 - 1]),
    FieldDescriptor.TYPE_UINT64: st.sampled_from([0, 1, 1_000, 2**53, 2**63, 2**64 - 1]),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_ENUM: st.integers(-1, 5),
    FieldDescriptor.TYPE_STRING: TEXT,
}


def is_repeated(field: FieldDescriptor) -> bool:
    """`label` is deprecated in protobuf 6, and `is_repeated` is not in 5."""
    found = getattr(field, "is_repeated", None)
    return field.label == FieldDescriptor.LABEL_REPEATED if found is None else bool(found)


def value_of(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    one = message_of(field.message_type) if field.message_type is not None else NUMBERS[field.type]
    return st.lists(one, max_size=3) if is_repeated(field) else one


def message_of(descriptor: Any) -> st.SearchStrategy[Any]:
    fields = {field.name: value_of(field) for field in descriptor.fields}
    return st.fixed_dictionaries({}, optional=fields).map(lambda some: GetMessageClass(descriptor)(**some))


async def answer(
    channel: grpc.aio.Channel, method: MethodDescriptor, request: Any
) -> tuple[grpc.StatusCode, str | None]:
    path = f"/{method.containing_service.full_name}/{method.name}"
    make = channel.unary_stream if method.server_streaming else channel.unary_unary
    call = make(
        path,
        request_serializer=type(request).SerializeToString,
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )(request)
    try:
        if method.server_streaming:
            with anyio.move_on_after(0.05):
                await anext(aiter(call))
            call.cancel()
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details()
    return grpc.StatusCode.OK, ""


CALLS = st.sampled_from(METHODS).flatmap(
    lambda method: st.tuples(st.just(method), message_of(method.input_type))
)


@settings(max_examples=700, deadline=None, suppress_health_check=list(HealthCheck))
@given(call=CALLS)
async def test_any_request(server: Server, call: tuple[MethodDescriptor, Any]) -> None:
    if not await server.running.registry.store.active_versions("org/model"):
        await server.api.make_ready()
        await server.api.register("g", GENERATOR)
    code, words = await answer(server.channel, *call)
    assert code in ANSWERS, words
    assert words or code is grpc.StatusCode.OK


async def test_bytes_that_are_no_message(server: Server) -> None:
    for service, name in ((REFIT, "CreateWeightVersion"), (CONTROL, "ListVersions")):
        call = server.channel.unary_unary(f"/{service}/{name}")
        with pytest.raises(grpc.aio.AioRpcError):
            await call(b"\xff\xff\xff\xff garbage")
    assert (await server.api.create("w")).uid == "w"
