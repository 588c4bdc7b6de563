"""A serving container of a few lines, for tests of what moves containers rather than models.

It answers `POST /predict`, and OpenAI's completions, with its version. `FAIL_SHARE` lets that share
of the answers be errors, `ANSWER_SECONDS` makes each take so long, `BROKEN` ends it before it is
healthy.
"""

import json
import os
import random
import sys
import threading
import time

from tests.stand_ins.http_server import Answer, json_answer, start_http_server

VERSION = os.environ.get("MODEL_VERSION", "")
FAIL_SHARE = float(os.environ.get("FAIL_SHARE", "0"))
ANSWER_SECONDS = float(os.environ.get("ANSWER_SECONDS", "0.03"))


def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
    if method == "GET":
        return json_answer(200, {"status": "ok"})
    asked = json.loads(body)
    time.sleep(ANSWER_SECONDS)
    if random.random() < FAIL_SHARE:
        return json_answer(500, {"error": "as asked for"})
    if "instances" in asked:
        return json_answer(200, {"predictions": [VERSION] * len(asked["instances"])})
    return json_answer(200, {"choices": [{"index": 0, "text": VERSION}]})


if "BROKEN" in os.environ:
    sys.exit("the model's files are damaged")
start_http_server(answer, int(os.environ["AIP_HTTP_PORT"]))
threading.Event().wait()
