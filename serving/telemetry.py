"""Metrics in Prometheus' text format, and one JSON line a request."""

import json
import logging
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from time import monotonic
from typing import Any

BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds of the duration histogram, in seconds."""

TALLY_SECONDS = 10.0


class Metrics:
    """Counts requests by route, status and version; tokens; durations; what is in flight."""

    def __init__(self) -> None:
        self.in_flight = 0
        self._lock = threading.Lock()
        self._requests: dict[tuple[str, int, str], int] = defaultdict(int)
        self._tokens: dict[tuple[str, str], int] = defaultdict(int)
        self._durations: dict[str, list[int]] = defaultdict(lambda: [0] * (len(BUCKETS) + 1))
        self._duration_sums: dict[str, float] = defaultdict(float)

    def request(self, path: str, status: int, version: str, seconds: float) -> None:
        """Count one answered request."""
        with self._lock:
            self._requests[path, status, version] += 1
            self._duration_sums[path] += seconds
            place = next((i for i, bound in enumerate(BUCKETS) if seconds <= bound), len(BUCKETS))
            self._durations[path][place] += 1

    def tokens(self, version: str, prompt: int, completion: int) -> None:
        """Count the tokens of one answer."""
        with self._lock:
            self._tokens[version, "prompt"] += prompt
            self._tokens[version, "completion"] += completion

    def render(self, engines: list[tuple[str, bool, float, int]]) -> str:
        """The exposition text.

        Args:
            engines: version, whether it is ready, share of the traffic, restarts.
        """
        with self._lock:
            lines = ["# TYPE serving_requests_total counter"]
            for (path, status, version), count in sorted(self._requests.items()):
                labels = f'path="{path}",status="{status}",version="{version}"'
                lines.append(f"serving_requests_total{{{labels}}} {count}")
            lines.append("# TYPE serving_tokens_total counter")
            for (version, kind), count in sorted(self._tokens.items()):
                lines.append(f'serving_tokens_total{{version="{version}",kind="{kind}"}} {count}')
            lines.append("# TYPE serving_request_seconds histogram")
            for path in sorted(self._durations):
                lines += self._histogram(path)
        lines += [
            "# TYPE serving_requests_in_flight gauge",
            f"serving_requests_in_flight {self.in_flight}",
        ]
        # Two engines may serve one version while the second takes over: a label stands once.
        versions = list(dict.fromkeys(engine[0] for engine in engines))
        for name, kind, place, of_both in (
            ("serving_engine_ready", "gauge", 1, max),
            ("serving_traffic_share", "gauge", 2, sum),
            ("serving_engine_restarts_total", "counter", 3, sum),
        ):
            lines.append(f"# TYPE {name} {kind}")
            for version in versions:
                value = of_both(float(engine[place]) for engine in engines if engine[0] == version)
                lines.append(f'{name}{{version="{version}"}} {value:g}')
        return "\n".join(lines) + "\n"

    def _histogram(self, path: str) -> list[str]:
        total, lines = 0, []
        for bound, count in zip([*BUCKETS, "+Inf"], self._durations[path], strict=True):
            total += count
            lines.append(f'serving_request_seconds_bucket{{path="{path}",le="{bound}"}} {total}')
        lines.append(
            f'serving_request_seconds_sum{{path="{path}"}} {self._duration_sums[path]:.6f}'
        )
        lines.append(f'serving_request_seconds_count{{path="{path}"}} {total}')
        return lines


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
