"""A serving container of a few lines, for tests of what moves containers rather than models.

It answers `POST /predict`, and OpenAI's completions, with its version. `FAIL_SHARE` lets that share
of the answers be errors, `ANSWER_SECONDS` makes each take so long, `BROKEN` ends it before it is
healthy.
"""

import json
import os
import random
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

VERSION = os.environ.get("MODEL_VERSION", "")
FAIL_SHARE = float(os.environ.get("FAIL_SHARE", "0"))
ANSWER_SECONDS = float(os.environ.get("ANSWER_SECONDS", "0.03"))


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(200, {"status": "ok"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        time.sleep(ANSWER_SECONDS)
        if random.random() < FAIL_SHARE:
            self._answer(500, {"error": "as asked for"})
        elif "instances" in body:
            self._answer(200, {"predictions": [VERSION] * len(body["instances"])})
        else:
            self._answer(200, {"choices": [{"index": 0, "text": VERSION}]})

    def _answer(self, status: int, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return None


if "BROKEN" in os.environ:
    sys.exit("the model's files are damaged")
ThreadingHTTPServer(("127.0.0.1", int(os.environ["AIP_HTTP_PORT"])), Handler).serve_forever()
