"""A server with OpenAI's completions that refuses `echo`; it writes one word.

`python -m tests.stand_ins.openai_without_echo PORT`. With a `bias`, it tells log-probabilities of
its answer, in which a bias for a token is "ignored" or "counted".
"""

import json
import sys
import threading
from functools import partial

from tests.stand_ins.http_server import Answer, json_answer, start_http_server


def answer(
    bias: str | None, method: str, path: str, headers: dict[str, str], body: bytes
) -> Answer:
    if method == "GET":
        return json_answer(200, {"object": "list", "data": []})
    asked = json.loads(body)
    if asked.get("echo"):
        refusal = {"message": "Only no echo is supported", "type": "invalid_request_error"}
        return json_answer(400, {"error": refusal})
    told = None
    if bias and asked.get("logprobs"):
        (token,) = asked.get("logit_bias") if bias == "counted" else ["word"]
        told = {"tokens": [token], "token_logprobs": [-1e-6 if bias == "counted" else -0.7]}
    choice = {"index": 0, "text": " word", "logprobs": told, "finish_reason": "length"}
    usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": 1, "total_tokens": 1}
    whole = {"object": "text_completion", "choices": [choice], "usage": usage}
    if not asked.get("stream"):
        return json_answer(200, whole)
    events = f"data: {json.dumps(whole)}\n\ndata: [DONE]\n\n".encode()
    return 200, [("content-type", "text/event-stream")], events


if __name__ == "__main__":
    start_http_server(partial(answer, None), int(sys.argv[1]))
    threading.Event().wait()
