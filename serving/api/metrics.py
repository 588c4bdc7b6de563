"""What is counted of requests and engines, in Prometheus' text format."""

from collections.abc import Sequence
from functools import partial

import prometheus_client as prometheus

from serving.state import RouteStatus

BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds of the duration histogram, in seconds."""


class Metrics:
    """Counts requests by route, status and version; tokens; durations; what is in flight."""

    def __init__(self) -> None:
        self.in_flight = 0
        self._registry = prometheus.CollectorRegistry()
        counter = partial(prometheus.Counter, registry=self._registry)
        gauge = partial(prometheus.Gauge, registry=self._registry)
        # When each counter was first used would be a line of its own for each.
        prometheus.disable_created_metrics()
        self._requests = counter("serving_requests", "Answered.", ["path", "status", "version"])
        self._tokens = counter("serving_tokens", "Read and written.", ["version", "kind"])
        self._seconds = prometheus.Histogram(
            *("serving_request_seconds", "To the last piece.", ["path"]),
            buckets=BUCKETS,
            registry=self._registry,
        )
        gauge("serving_requests_in_flight", "Now.").set_function(lambda: self.in_flight)
        self._ready = gauge("serving_engine_ready", "1 or 0.", ["version"])
        self._share = gauge("serving_traffic_share", "Of the requests.", ["version"])
        self._restarts = counter("serving_engine_restarts", "After deaths.", ["version"])

    def leave(self) -> None:
        """Note that a request is no longer in flight."""
        self.in_flight -= 1

    def request(self, path: str, status: int, version: str, seconds: float) -> None:
        """Count one answered request."""
        self._requests.labels(path, status, version).inc()
        self._seconds.labels(path).observe(seconds)

    def tokens(self, version: str, prompt: int, completion: int) -> None:
        """Count the tokens of one answer."""
        self._tokens.labels(version, "prompt").inc(prompt)
        self._tokens.labels(version, "completion").inc(completion)

    def render(self, routes: Sequence[RouteStatus]) -> str:
        """The exposition text; routes are those of now, several of which may be of one version."""
        for family in (self._ready, self._share, self._restarts):
            family.clear()
        for route in sorted(routes, key=lambda route: route.ready):
            self._ready.labels(route.version).set(route.ready)
            self._share.labels(route.version).inc(route.share)
            self._restarts.labels(route.version).inc(route.restarts)
        return prometheus.generate_latest(self._registry).decode()
