"""A custom job that the local Vertex AI runs."""

import threading
from dataclasses import dataclass, field

from google.cloud import aiplatform_v1
from google.protobuf import timestamp_pb2

from tests.stand_ins.processes import RealProcess


@dataclass
class RunningJob:
    """A job and the processes of its replicas."""

    job: aiplatform_v1.CustomJob
    replicas: dict[str, RealProcess] = field(default_factory=dict)
    restart: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)
    starts: int = 0
    machines: dict[str, str] = field(default_factory=dict)
    """Replica to the name of its machine, which is another one after a restart."""


def now() -> timestamp_pb2.Timestamp:
    moment = timestamp_pb2.Timestamp()
    moment.GetCurrentTime()
    return moment
