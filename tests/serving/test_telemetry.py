"""The metrics' text."""

from serving.telemetry import Metrics


def test_two_engines_of_one_version_are_one_line_of_each_metric() -> None:
    text = Metrics().render([("7", True, 0.9, 1), ("7", False, 0.1, 0), ("8", True, 0.0, 0)])
    assert text.count('serving_engine_ready{version="7"}') == 1
    assert 'serving_engine_ready{version="7"} 1' in text
    assert 'serving_traffic_share{version="7"} 1' in text
    assert 'serving_engine_restarts_total{version="7"} 1' in text
    assert 'serving_traffic_share{version="8"} 0' in text
