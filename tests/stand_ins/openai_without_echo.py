"""A server with OpenAI's completions that, as llama-server, refuses `echo`; it writes one word."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(200, {"object": "list", "data": []})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body.get("echo"):
            refusal = {"message": "Only no echo is supported", "type": "invalid_request_error"}
            return self._answer(400, {"error": refusal})
        choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": "length"}
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": 1, "total_tokens": 1}
        whole = {"object": "text_completion", "choices": [choice], "usage": usage}
        if not body.get("stream"):
            return self._answer(200, whole)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write(f"data: {json.dumps(whole)}\n\ndata: [DONE]\n\n".encode())

    def _answer(self, status: int, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return None


ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
