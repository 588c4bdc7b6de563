"""Metrics in Prometheus' text format, and one JSON line a request."""

import json
import logging
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from time import monotonic
from typing import Any

BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds of the duration histogram, in seconds."""
Samples = dict[str, float]

TALLY_SECONDS = 10.0


class Metrics:
    """Counts requests by route, status and version; tokens; durations; what is in flight.

    All of it by one event loop. Samples are known by what stands behind the name of their family.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self._requests: Samples = defaultdict(int)
        self._tokens: Samples = defaultdict(int)
        self._seconds: Samples = defaultdict(int)

    def request(self, path: str, status: int, version: str, seconds: float) -> None:
        """Count one answered request."""
        self._requests[f'{{path="{path}",status="{status}",version="{version}"}}'] += 1
        for bound in (*BUCKETS, "+Inf"):
            self._seconds[f'_bucket{{path="{path}",le="{bound}"}}'] += seconds <= float(bound)
        self._seconds[f'_sum{{path="{path}"}}'] += seconds
        self._seconds[f'_count{{path="{path}"}}'] += 1

    def tokens(self, version: str, prompt: int, completion: int) -> None:
        """Count the tokens of one answer."""
        self._tokens[f'{{version="{version}",kind="prompt"}}'] += prompt
        self._tokens[f'{{version="{version}",kind="completion"}}'] += completion

    def render(self, engines: list[tuple[str, bool, float, int]]) -> str:
        """The exposition text.

        Args:
            engines: version, whether it is ready, share of the traffic, restarts.
        """
        ready, share, restarts = (defaultdict[str, float](float) for _ in range(3))
        # Two engines may serve one version while the second takes over: a label stands once.
        for version, is_ready, its_share, its_restarts in engines:
            labels = f'{{version="{version}"}}'
            ready[labels] = max(ready[labels], is_ready)
            share[labels] += its_share
            restarts[labels] += its_restarts
        families: list[tuple[str, str, Mapping[str, float]]] = [
            ("serving_requests_total", "counter", self._requests),
            ("serving_tokens_total", "counter", self._tokens),
            ("serving_request_seconds", "histogram", self._seconds),
            ("serving_requests_in_flight", "gauge", {"": self.in_flight}),
            ("serving_engine_ready", "gauge", ready),
            ("serving_traffic_share", "gauge", share),
            ("serving_engine_restarts_total", "counter", restarts),
        ]
        lines = []
        for name, kind, samples in families:
            lines.append(f"# TYPE {name} {kind}")
            lines += [f"{name}{labels} {value:.12g}" for labels, value in samples.items()]
        return "\n".join(lines) + "\n"


def event(name: str, **fields: Any) -> str:
    """One line of the log, as JSON."""
    line = {"at": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": name} | fields
    return json.dumps(line)


def log(name: str, **fields: Any) -> None:
    """Write one line of JSON to the log; a full disk must not stop the server."""
    try:
        print(event(name, **fields), file=sys.stderr, flush=True)
    except OSError:
        return


class LogHandler(logging.Handler):
    """What libraries log, as lines of the same log."""

    def emit(self, record: logging.LogRecord) -> None:
        trace = (
            {"traceback": traceback.format_exception(*record.exc_info)} if record.exc_info else {}
        )
        log(record.levelname.lower(), of=record.name, text=record.getMessage(), **trace)


class Tally:
    """Logs something that may come in thousands: its first, then how many came in a while."""

    def __init__(self, name: str, clock: Callable[[], float] = monotonic) -> None:
        self._name, self._clock = name, clock
        self._said_at = -TALLY_SECONDS
        self._unsaid = 0

    def add(self, **fields: Any) -> None:
        """Count one; `fields` are those of the one that is logged."""
        self._unsaid += 1
        now = self._clock()
        if now - self._said_at >= TALLY_SECONDS:
            log(self._name, count=self._unsaid, **fields)
            self._said_at, self._unsaid = now, 0
