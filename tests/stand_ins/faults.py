"""Faults on order: which call goes wrong, how, and how often."""

import threading
from dataclasses import dataclass, field
from typing import Any

import grpc


@dataclass
class Fault:
    """One kind of trouble for one method, until it has struck `times` times."""

    method: str
    code: grpc.StatusCode
    message: str
    times: int
    after_work: bool
    """Strike after the server has done the work: the reply is lost, not the request."""
    seconds: float = 0.0
    """How late the reply is; with the code OK it is no other than it would be."""


@dataclass
class FaultScript:
    """What a server is to do wrong, and what it was asked."""

    calls: list[str] = field(default_factory=list)
    _faults: list[Fault] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(
        self,
        method: str,
        code: grpc.StatusCode,
        message: str = "",
        times: int = 1,
        after_work: bool = False,
    ) -> None:
        """Let the next `times` calls of a method (short name: `CreateBatch`) end with a code."""
        with self._lock:
            self._faults.append(Fault(method, code, message or code.name, times, after_work))

    def delay(self, method: str, seconds: float) -> None:
        """Let the reply to the next call of a method come so late."""
        with self._lock:
            self._faults.append(Fault(method, grpc.StatusCode.OK, "", 1, True, seconds))

    def clear(self) -> None:
        """Forget all faults and the record of calls."""
        with self._lock:
            self._faults.clear()
            self.calls.clear()

    def count(self, method: str) -> int:
        """How often a method was called."""
        return self.calls.count(method)

    def record(self, method: str) -> None:
        with self._lock:
            self.calls.append(method)

    def take(self, method: str, after_work: bool) -> Fault | None:
        """The fault that strikes this call, if any."""
        with self._lock:
            for fault in self._faults:
                if fault.method == method and fault.after_work == after_work and fault.times > 0:
                    fault.times -= 1
                    return fault
        return None


class RpcFailed(Exception):
    """Raised by a service to end a call with a status other than OK."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def not_found(what: Any) -> RpcFailed:
    return RpcFailed(grpc.StatusCode.NOT_FOUND, f"Not found: {what}")


def already_exists(what: Any) -> RpcFailed:
    return RpcFailed(grpc.StatusCode.ALREADY_EXISTS, f"Already exists: {what}")


def invalid(message: str) -> RpcFailed:
    return RpcFailed(grpc.StatusCode.INVALID_ARGUMENT, message)
