"""The metrics' text."""

from serving.api.dispatcher import Metrics
from serving.state import RouteStatus


def test_engines_of_one_version_are_one_line_of_each_metric_and_a_version_that_is_gone_none() -> (
    None
):
    common = {"fingerprint": "", "engine_pid": None}
    engines = [
        RouteStatus(version="7", ready=True, share=0.9, restarts=1, **common),
        RouteStatus(version="7", ready=False, share=0.1, restarts=0, **common),
        RouteStatus(version="8", ready=True, share=0.0, restarts=0, **common),
    ]
    metrics = Metrics()
    text = metrics.render(engines)
    assert text.count('serving_engine_ready{version="7"}') == 1
    assert 'serving_engine_ready{version="7"} 1' in text
    assert 'serving_traffic_share{version="7"} 1' in text
    assert 'serving_engine_restarts_total{version="7"} 1' in text
    assert 'serving_traffic_share{version="8"} 0' in text
    assert 'version="7"' not in metrics.render([])
