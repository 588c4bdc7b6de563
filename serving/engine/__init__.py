"""The inference engine: one loaded model in a process of its own."""

import sys

# OpenVINO and NNCF report their use to a server outside as soon as they are imported, unless this
# package is missing; both do without it then.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
