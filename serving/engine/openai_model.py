"""A language model behind another server with OpenAI's routes, such as vLLM on a GPU.

Tokens and chat template stay the version's own: whatever a client asks, the other server is asked
for the completion of the tokens that this project encodes.
"""

import asyncio
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx

from artifacts.errors import UserError
from artifacts.model import context_tokens, read_config
from artifacts.program.lifetime import BY_WAY_OF_THIS, PARENT_VARIABLE, how_it_ended
from artifacts.settings import read_key
from serving.engine import protocol, served_model
from serving.errors import message_of
from serving.settings import OpenAIEngine

POLL_SECONDS = 0.5
CONNECT_SECONDS = 5.0
CLIENTS_FAULTS = (400, 413, 422)
"""Statuses with which a server refuses what it is asked; others are between it and this one."""
BIAS = 100
"""The most that OpenAI's API takes; more than lies between any token and the likeliest."""


class OpenAIModel(served_model.PromptEncoder):
    """Asks another server, which batches requests itself; its errors are told with its name."""

    def __init__(self, folder: Path, tokenizer: Path, engine: OpenAIEngine) -> None:
        """Start the server, where that is asked for, and wait until it writes a token.

        Args:
            folder: the Hugging Face folder that it serves.
            tokenizer: where `ServedTokenizer.write` wrote that of the folder.

        Raises:
            UserError: it ended, is not there, or refuses to write.
        """
        # The system names a free port; closed at once, it is left to the server that is started on
        # it.
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])

        def fill(word: str) -> str:
            return word.replace("{model}", str(folder)).replace("{port}", port)

        self.tokenizer = served_model.ServedTokenizer.read(tokenizer)
        self.context_tokens = context_tokens(read_config(folder)) or sys.maxsize
        self._model = fill(engine.model)
        self._name = f"The engine at {fill(engine.address)}"
        headers = {}
        if variable := engine.key_variable:
            if (key := read_key(variable)) is None:
                raise UserError(
                    f"`endpoint.engine.key_variable` names {variable}, which is not set or holds "
                    "no key. Put the engine's key into it."
                )
            headers["Authorization"] = f"Bearer {key}"
        self._http: dict[str, Any] = {
            "base_url": fill(engine.address),
            "headers": headers,
            # The API server limits how long an answer takes, and gives up a call by canceling it.
            "timeout": httpx.Timeout(None, connect=CONNECT_SECONDS),
            # Any number at once; idle ones are closed sooner than servers close them.
            "limits": httpx.Limits(keepalive_expiry=2.0),
            # Or the environment's proxy would be told the key, and read what clients ask.
            "trust_env": False,
        }
        self._client = httpx.AsyncClient(**self._http)
        self._leading = asyncio.Lock()
        self._process = None
        if engine.command:
            # Of this one's process group, and among its descendants, so that nothing of it is left
            # once this one has ended.
            self._process = subprocess.Popen(
                [*BY_WAY_OF_THIS, *map(fill, engine.command)],
                stdin=subprocess.DEVNULL,
                env=os.environ | {PARENT_VARIABLE: str(os.getpid())},
            )
        self._wait_until_it_writes()

    def _wait_until_it_writes(self) -> None:
        request = protocol.GenerateRequest(max_tokens=1, max_prompt_tokens=1, stream=False)
        with httpx.Client(**self._http) as client:
            # `EngineProcess` ends this program if it takes longer than `endpoint.start_timeout`.
            while True:
                if message := self._ended():
                    raise UserError(f"{message} while it loaded.")
                try:
                    # Any token will do as a prompt, since nobody reads the answer.
                    answer = client.post("completions", json=self._body(request, [0]))
                except httpx.HTTPError as error:
                    # A server that this program has started may not listen yet; any other should.
                    if self._process is None:
                        raise UserError(f"{self._name} does not answer ({error}).") from error
                else:
                    if answer.status_code == 200:
                        return
                    # 503 says that it is still loading.
                    if answer.status_code != 503:
                        raise UserError(self._refusal(answer))
                time.sleep(POLL_SECONDS)

    def _ended(self) -> str | None:
        code = self._process.poll() if self._process else None
        return None if code is None else f"{self._name} {how_it_ended(code)}"

    async def check(self) -> None:
        """Return once a server that was started answers; the API server knows how long that may
        take. Where the server has ended, so does this program, with all that is left of it."""
        while self._process is not None:
            if message := self._ended():
                print(f"{message}.", file=sys.stderr, flush=True)
                signal.raise_signal(signal.SIGTERM)
            try:
                await self._client.get("models")
                return
            except httpx.HTTPError:
                await asyncio.sleep(POLL_SECONDS)

    async def generate(
        self, request: protocol.GenerateRequest, tokens: list[int]
    ) -> AsyncGenerator[protocol.Chunk, None]:
        echo, count, end = self.echo(request, tokens), 0, ""
        chunk = protocol.Chunk(echo=echo, prompt_tokens=len(tokens))
        try:
            if echo and request.logprobs:
                chunk.scores = await self._prompt_scores(request, tokens, echo)
            if not request.max_tokens:
                yield chunk.model_copy(update={"finish_reason": "length"})
                return
            body = self._body(request, [*tokens, *self.encode_written(request)])
            offset = len(echo) + len(request.written)
            async with aclosing(self._pieces(body)) as pieces:
                async for piece in pieces:
                    for choice in piece.get("choices") or []:
                        chunk.text += choice["text"] or ""
                        if request.logprobs:
                            chunk.scores += _scores(choice, request.top, offset)
                        offset += len(choice["text"] or "")
                        end, count = choice.get("finish_reason") or end, count + 1
                    # The server counts at the end; until then, each piece counts as a token.
                    count = (piece.get("usage") or {}).get("completion_tokens", count)
                    chunk.completion_tokens = count
                    # A piece without text waits for the next one, with its scores; the last one is
                    # kept for the finish reason.
                    if chunk.text and not end:
                        yield chunk
                        chunk = protocol.Chunk(prompt_tokens=len(tokens), completion_tokens=count)
            if not end:
                raise protocol.EngineLost("broke off")
            yield chunk.model_copy(
                update={"finish_reason": "length" if end == "length" else "stop"}
            )
        except protocol.EngineLost as lost:
            yield protocol.Chunk(error=f"{self._name} {lost}")
        except httpx.HTTPError as error:
            yield protocol.Chunk(error=f"{self._name} does not answer ({type(error).__name__})")
        except (ValueError, LookupError, TypeError) as error:
            yield protocol.Chunk(
                error=f"{self._name} does not answer in OpenAI's format ({error!r})"
            )

    def _body(self, request: protocol.GenerateRequest, prompt: list[int]) -> dict[str, Any]:
        """A completion as OpenAI's clients ask for it; what is not asked for is left out."""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "stream": request.stream,
        }
        options = {
            "stop": request.stop or None,
            "seed": request.seed,
            "ignore_eos": request.ignore_eos or None,
            "logprobs": max(1, request.top) if request.logprobs else None,
            "stream_options": {"include_usage": True} if request.stream else None,
        }
        return body | {name: value for name, value in options.items() if value is not None}

    async def _pieces(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """An answer's pieces, one where it is no stream; raises Refused, EngineLost, HTTPError."""
        async with self._client.stream("POST", "completions", json=body) as answer:
            if answer.status_code != 200:
                # httpx has the content of a streamed answer only once it was read.
                await answer.aread()
                if answer.status_code in CLIENTS_FAULTS:
                    raise protocol.Refused(self._refusal(answer), "prompt")
                raise protocol.EngineLost(
                    f"answered {answer.status_code}: {message_of(answer.content)}"
                )
            if not body["stream"]:
                yield json.loads(await answer.aread())
                return
            async for line in _lines(answer):
                data = line.removeprefix("data:").strip()
                if data == line or data == "[DONE]":
                    continue
                piece = json.loads(data)
                if "error" in piece:
                    raise protocol.EngineLost(f"broke off: {message_of(data.encode())}")
                yield piece

    def _refusal(self, answer: httpx.Response) -> str:
        message = message_of(answer.content) or f"status {answer.status_code}"
        return f"{self._name} refuses: {message.rstrip('.')}."

    async def _prompt_scores(
        self, request: protocol.GenerateRequest, tokens: list[int], text: str
    ) -> list[protocol.TokenScore]:
        """How likely each token of a prompt is; raises Refused where the server does not say it."""
        # As lm-eval asks, which servers heed: for one token more, since not all can write none.
        changes = {"max_tokens": 1, "stream": False, "stop": [], "ignore_eos": False}
        scoring = request.model_copy(update=changes | {"temperature": 0.0, "top_p": 1.0})
        scores = [protocol.TokenScore(token="", bytes=[], logprob=None, offset=0)]
        if len(tokens) > 1:
            try:
                echoed = await self._ask_scores(scoring, tokens, echo=True)
                if len(echoed) < len(tokens):
                    reason = f"{self._name} returns no log-probabilities for a prompt."
                    raise protocol.Refused(reason, "echo")
                scores = echoed
            except protocol.Refused as refused:
                scores += await self._led(scoring, tokens, refused)
        texts = served_model.TokenTexts(self.tokenizer, text, len(tokens), 0)
        return [
            texts.score(served_model.TokenLikelihood(token, score.logprob)).model_copy(
                update={"top": score.top}
            )
            # Without the score of the one token that had to be written.
            for token, score in zip(tokens, scores[: len(tokens)], strict=True)
        ]

    async def _led(
        self, request: protocol.GenerateRequest, tokens: list[int], refusal: protocol.Refused
    ) -> list[protocol.TokenScore]:
        """How likely the tokens after the first are, of a server that is led through them.

        llama-server has no `echo`. A bias forces one token after another, of which it tells how
        likely each was before the bias, and it keeps what it computed for the tokens before.

        Raises:
            Refused: the server heeds no bias, or tells what is likely with it.
        """
        # The last token of each, as some tokenizers begin every text with a token for a space.
        letter, other = (self.tokenizer.encode(text, add_special_tokens=False)[-1] for text in "ab")
        # One prompt at a time: several would push each other out of what the server keeps.
        async with self._leading:
            probes = [
                await self._ask_scores(request, tokens[:1], logit_bias={token: BIAS})
                for token in (letter, other)
            ]
            names = {score.token for probe in probes for score in probe}
            certain = sum(math.exp(score.logprob or 0) for probe in probes for score in probe)
            # With its bias each letter is all but certain; without, both share a probability of 1.
            # A higher sum shows that the server tells probabilities after the bias.
            if len(names) < 2 or certain > 1.001:
                raise refusal
            scores = []
            for place, token in enumerate(tokens[1:], 1):
                before = tokens[:place]
                forced = await self._ask_scores(request, before, logit_bias={token: BIAS})
                scores += forced or [await self._looked_up(request, before, token, letter)]
        return scores

    async def _looked_up(
        self, request: protocol.GenerateRequest, prompt: list[int], token: int, letter: int
    ) -> protocol.TokenScore:
        """How likely a token is that ends within a character: llama-server writes none of those,
        but names them among all that might stand in a letter's place."""
        every = {"logprobs": self.tokenizer.backend.get_vocab_size(), "logit_bias": {letter: BIAS}}
        choice = await self._choice(self._body(request, prompt) | every)
        (place,) = choice["logprobs"]["content"]
        logprob = {likely["id"]: likely["logprob"] for likely in place["top_logprobs"]}[token]
        return protocol.TokenScore(token="", bytes=[], logprob=logprob, offset=0)

    async def _ask_scores(
        self, request: protocol.GenerateRequest, prompt: list[int], **more: Any
    ) -> list[protocol.TokenScore]:
        return _scores(await self._choice(self._body(request, prompt) | more), request.top)

    async def _choice(self, body: dict[str, Any]) -> dict[str, Any]:
        try:
            (answer,) = [piece async for piece in self._pieces(body)]
        except protocol.Refused as error:
            text = f"No log-probabilities for the prompt: {error}"
            raise protocol.Refused(text, "echo") from error
        choice: dict[str, Any] = answer["choices"][0]
        return choice


def _scores(choice: dict[str, Any], top: int, offset: int = 0) -> list[protocol.TokenScore]:
    """Those of an answer's tokens, from the shape of completions or, as llama-server has it, of
    chats.

    Args:
        offset: where this piece begins in the text that is sent.
    """
    logprobs = choice.get("logprobs") or {}
    if "content" in logprobs:
        tokens = [place["token"] for place in logprobs["content"]]
        own_logprobs = [place["logprob"] for place in logprobs["content"]]
        tops = [
            {other["token"]: other["logprob"] for other in place.get("top_logprobs") or []}
            for place in logprobs["content"]
        ]
    else:
        tokens, own_logprobs = logprobs.get("tokens") or [], logprobs.get("token_logprobs") or []
        tops = logprobs.get("top_logprobs") or [None] * len(tokens)
    scores = []
    for token, logprob, alternatives in zip(tokens, own_logprobs, tops, strict=True):
        # Cut to `top`, since the server is asked for at least one (`_body`), even where `top` is 0.
        likeliest = sorted((alternatives or {}).items(), key=lambda pair: -pair[1])[:top]
        likely = [
            protocol.LikelyToken(token=name, bytes=list(name.encode()), logprob=value)
            for name, value in likeliest
        ]
        scores.append(
            protocol.TokenScore(
                token=token, bytes=list(token.encode()), logprob=logprob, offset=offset, top=likely
            )
        )
        offset += len(token)
    return scores


async def _lines(answer: httpx.Response) -> AsyncIterator[str]:
    """The lines of a stream of events, split at line feeds alone: httpx also splits at characters
    that JSON may hold."""
    rest = ""
    async for text in answer.aiter_text():
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            yield line.removesuffix("\r")
    yield rest
