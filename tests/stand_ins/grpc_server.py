"""One gRPC server for any Google service, its methods read out of the generated clients.

A generated transport knows each method's path, request type and reply type. `service_methods`
asks it for them through a channel that only takes notes, so no copy of Google's interface
definitions is kept here.
"""

import itertools
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import google.auth.credentials
import grpc
from google.longrunning import operations_pb2
from google.protobuf import empty_pb2
from google.protobuf.message import Message

from tests.stand_ins.faults import FaultScript, RpcFailed, not_found
from tests.stand_ins.identity import Certificates
from tests.stand_ins.proxy import TcpProxy


@dataclass(frozen=True)
class MethodTypes:
    """How to read one method's request and write its reply."""

    deserialize: Callable[[bytes], Any]
    serialize: Callable[[Any], bytes]


def plain_types(request: Any, reply: Any) -> MethodTypes:
    """Of a method whose messages have no wrappers."""
    return MethodTypes(request.FromString, reply.SerializeToString)


OPERATIONS = {
    f"/google.longrunning.Operations/{name}Operation{plural}": plain_types(
        getattr(operations_pb2, f"{name}Operation{plural}Request"), reply
    )
    for name, plural, reply in (
        ("Get", "", operations_pb2.Operation),
        ("List", "s", operations_pb2.ListOperationsResponse),
        ("Cancel", "", empty_pb2.Empty),
    )
}


class _NoteTakingChannel(grpc.Channel):
    """Gives stubs out and notes what they were made of."""

    def __init__(self) -> None:
        self.methods: dict[str, MethodTypes] = {}

    def unary_unary(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        **_: Any,
    ) -> Any:
        request_type = getattr(request_serializer, "__self__", None)
        reply_type = getattr(response_deserializer, "__self__", None)
        if request_type is not None and reply_type is not None:
            self.methods[method] = MethodTypes(
                request_type.deserialize, getattr(reply_type, "serialize", _serialize_plain)
            )
        return lambda *args, **kwargs: None

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return None

    stream_unary = stream_stream = subscribe = unsubscribe = unary_stream

    def close(self) -> None:
        return None


def _serialize_plain(message: Any) -> bytes:
    return bytes(message.SerializeToString())


def service_methods(client: Any) -> Mapping[str, MethodTypes]:
    """Every unary method of a generated client, by its full path."""
    channel = _NoteTakingChannel()
    credentials = google.auth.credentials.AnonymousCredentials()
    instance = client.get_transport_class("grpc")(channel=channel, credentials=credentials)
    names = list(instance._stubs)
    instance._stubs.clear()
    instance._logged_channel = channel
    for name in names:
        getattr(instance, name)
    return channel.methods


PAGE_SIZE = 2
"""Items of a list in one answer; Google's is larger, and nobody may count on one page."""


def first_page(request: Any, reply: Any) -> Any:
    """A list's answer without what is on its other pages; other answers as they are."""
    message = reply if isinstance(reply, Message) else type(reply).pb(reply)
    fields = message.DESCRIPTOR.fields_by_name
    if "next_page_token" not in fields:
        return reply
    (items,) = [
        getattr(message, n)
        for n, f in fields.items()
        if f.label == f.LABEL_REPEATED and f.message_type
    ]
    start = int(request.page_token or 0)
    end = start + min(request.page_size or PAGE_SIZE, PAGE_SIZE)
    if len(items) > end:
        message.next_page_token = str(end)
    del items[end:]
    del items[:start]
    return reply


def snake_case(name: str) -> str:
    """`CreateCustomJob` to `create_custom_job`."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


class Operations:
    """Long-running operations of all services: done ones, and what to call to cancel the others."""

    def __init__(self) -> None:
        self._cancel: dict[str, Callable[[], None]] = {}
        self._done: dict[str, operations_pb2.Operation] = {}
        self._count = itertools.count(1)

    def run(self, resource: str, work: Callable[[], Any]) -> operations_pb2.Operation:
        """An operation on a resource that is done once `work` has returned its response.

        Where `work` raises RpcFailed, the operation is done with that error.
        """
        name = f"{resource}/operations/{next(self._count)}"
        self._cancel[name] = lambda: None
        threading.Thread(target=self._work, args=(name, work), daemon=True).start()
        return operations_pb2.Operation(name=name)

    def _work(self, name: str, work: Callable[[], Any]) -> None:
        try:
            self.finished(name, work())
        except RpcFailed as failure:
            operation = operations_pb2.Operation(name=name, done=True)
            operation.error.code = failure.code.value[0]
            operation.error.message = failure.message
            self._done[name] = operation

    def running(self, resource: str) -> list[str]:
        """Names of the changes of a resource that are under way."""
        names = [name for name in self._cancel if name.startswith(f"{resource}/operations/")]
        return [name for name in names if name not in self._done]

    def list_operations(self, request: operations_pb2.ListOperationsRequest) -> Any:
        names = [name for name in self._cancel if name.startswith(f"{request.name}/operations/")]
        found = [self._done.get(name, operations_pb2.Operation(name=name)) for name in names]
        return operations_pb2.ListOperationsResponse(operations=found)

    def register(self, name: str, cancel: Callable[[], None]) -> operations_pb2.Operation:
        """A running operation that `cancel` stops."""
        self._cancel[name] = cancel
        return operations_pb2.Operation(name=name)

    def finished(self, name: str, response: Any) -> operations_pb2.Operation:
        """An operation that was done at once."""
        operation = operations_pb2.Operation(name=name, done=True)
        message = response if isinstance(response, Message) else type(response).pb(response)
        operation.response.Pack(message)
        self._done[name] = operation
        return operation

    def get_operation(self, request: operations_pb2.GetOperationRequest) -> Any:
        if request.name in self._done:
            return self._done[request.name]
        if request.name in self._cancel:
            return operations_pb2.Operation(name=request.name)
        raise not_found(request.name)

    def cancel_operation(self, request: operations_pb2.CancelOperationRequest) -> Any:
        if request.name not in self._cancel:
            raise not_found(request.name)
        self._cancel[request.name]()
        return empty_pb2.Empty()


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, server: "GoogleServer") -> None:
        self._server = server

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        found = self._server.methods.get(details.method)
        if found is None:
            return None
        types, implementation = found
        short = details.method.rsplit("/", 1)[1]

        def call(request: Any, context: grpc.ServicerContext) -> Any:
            return self._server.call(short, implementation, request, context)

        return grpc.unary_unary_rpc_method_handler(call, types.deserialize, types.serialize)


class GoogleServer:
    """A TLS server on a loopback port, behind a proxy that can cut its connections."""

    def __init__(
        self,
        certificates: Certificates,
        authorize: Callable[[str | None], str],
        check: Callable[[str, Any, str], None],
    ) -> None:
        """Not started yet.

        Args:
            authorize: the account of a request's credentials; refuses others.
            check: refuses a method's request that an account may not make.
        """
        self.faults = FaultScript()
        self.operations = Operations()
        self.methods: dict[str, tuple[MethodTypes, Callable[[Any], Any]]] = {}
        self._authorize = authorize
        self._check = check
        self._server = grpc.server(ThreadPoolExecutor(max_workers=8))
        self._server.add_generic_rpc_handlers((_Handler(self),))
        credentials = grpc.ssl_server_credentials([(certificates.server_key, certificates.server)])
        port = self._server.add_secure_port("127.0.0.1:0", credentials)
        self.proxy = TcpProxy(port)
        self.add_methods(OPERATIONS, self.operations)

    @property
    def endpoint(self) -> str:
        """What a client's `api_endpoint` has to be."""
        return f"localhost:{self.proxy.port}"

    def add_methods(self, methods: Mapping[str, MethodTypes], implementation: object) -> None:
        """Serve those of the methods that the implementation has, by their snake-case names."""
        for path, types in methods.items():
            function = getattr(implementation, snake_case(path.rsplit("/", 1)[1]), None)
            if function is not None:
                self.methods[path] = (types, function)

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        self.proxy.stop()
        self._server.stop(grace=0).wait()

    def call(
        self,
        method: str,
        implementation: Callable[[Any], Any],
        request: Any,
        context: grpc.ServicerContext,
    ) -> Any:
        """Answer one call: credentials, faults, the work, faults again."""
        self.faults.record(method)
        metadata = dict(context.invocation_metadata())
        try:
            caller = self._authorize(metadata.get("authorization"))
            self._check(method, request, caller)
            self._strike(method, after_work=False)
            reply = first_page(request, implementation(request))
            self._strike(method, after_work=True)
            return reply
        except RpcFailed as failure:
            context.abort(failure.code, failure.message)
        return None

    def _strike(self, method: str, after_work: bool) -> None:
        fault = self.faults.take(method, after_work)
        if fault is None:
            return
        threading.Event().wait(fault.seconds)
        if fault.code is grpc.StatusCode.OK:
            return
        if fault.code is grpc.StatusCode.UNKNOWN:
            threading.Thread(target=self.proxy.reset_connections).start()
            threading.Event().wait(0.2)
        raise RpcFailed(fault.code, fault.message)

    def reset_connection_on(self, method: str, times: int = 1, after_work: bool = False) -> None:
        """Cut the TCP connection (RST) instead of answering."""
        self.faults.add(method, grpc.StatusCode.UNKNOWN, "connection reset", times, after_work)
