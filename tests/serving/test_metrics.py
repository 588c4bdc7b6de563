"""The metrics' text."""

from serving.api.dispatcher import Metrics
from serving.state import RouteStatus


def route(version: str, ready: bool, share: float, restarts: int) -> RouteStatus:
    return RouteStatus(
        version=version,
        fingerprint="",
        share=share,
        engine_pid=None,
        ready=ready,
        restarts=restarts,
    )


def test_two_engines_of_one_version_are_one_line_of_each_metric() -> None:
    engines = [route("7", True, 0.9, 1), route("7", False, 0.1, 0), route("8", True, 0.0, 0)]
    text = Metrics().render(engines)
    assert text.count('serving_engine_ready{version="7"}') == 1
    assert 'serving_engine_ready{version="7"} 1' in text
    assert 'serving_traffic_share{version="7"} 1' in text
    assert 'serving_engine_restarts_total{version="7"} 1' in text
    assert 'serving_traffic_share{version="8"} 0' in text


def test_a_version_that_is_gone_is_told_no_more() -> None:
    metrics = Metrics()
    metrics.render([route("7", True, 1.0, 0)])
    assert 'version="7"' not in metrics.render([])
