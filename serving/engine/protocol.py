"""What API server and engine say to each other: JSON lines over a pair of sockets.

The API server makes the pair and the engine inherits its end, so an engine listens nowhere. Calls
have numbers, and their answers' pieces come mixed, as they are written.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

LONGEST_LINE = 2**40
"""Bytes, more than any line has: requests are limited elsewhere, and an answer that could not be
read would hold up all others."""
ENDED = "the engine ended"
FinishReason = Literal["stop", "length"]


class _Line(BaseModel):
    """Neither side sends a field that the other does not know."""

    model_config = ConfigDict(extra="forbid")


class Message(_Line):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


class GenerateRequest(_Line):
    """What the engine is asked for: the continuation of a text, or of a chat."""

    prompt: str | list[int] | None = None
    """Raw text, no chat template; or its tokens."""
    messages: list[Message] | None = None
    """A chat, rendered with the model's own template."""
    max_tokens: int = Field(ge=0)
    max_prompt_tokens: int = Field(ge=1)
    """Longest prompt that is taken; the engine alone can count tokens."""
    temperature: float = Field(default=0.0, ge=0)
    """0 takes the most likely token each time."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    stop: list[str] = []
    ignore_eos: bool = False
    """Whether to write on where the model would end."""
    seed: int | None = None
    """Of what is drawn at a temperature; the same request with the same seed draws the same."""
    stream: bool = True
    """Whether to send each piece when it is written, or everything in one line at the end."""
    logprobs: bool = False
    """Whether to say how likely each token was."""
    top: int = Field(default=0, ge=0)
    """How many of the most likely tokens of each place to name with them."""
    echo: bool = False
    """Whether to give the prompt back before the answer, with its log-probabilities if asked."""
    is_input: bool = False
    """Whether the prompt is an input of the task that the version was taught, before which comes
    what came before it in training."""
    own_length: bool = False
    """Whether the answer may be as long as the task's targets, where a version knows that."""
    written: str = ""
    """The beginning of the answer, written by an engine that died before it was complete."""


class LikelyToken(_Line):
    """A token that might stand in a place, and how likely it was there."""

    token: str
    """Its text, which no other token of this place has. Of one that is no whole characters, its
    bytes as OpenAI writes them, `bytes:\\xe6\\xbc`."""
    bytes: list[int]
    """Its own, in UTF-8, where a character may be spread over several tokens."""
    logprob: float | None
    """Natural logarithm; None of a prompt's first token, which nothing predicts."""


class TokenScore(LikelyToken):
    """A token of a prompt or an answer; its text is what it adds to that, nothing while a character
    is not complete."""

    offset: int
    """Where it begins in the text that is sent, in characters."""
    top: list[LikelyToken] = []
    """The most likely tokens of this place, from the likeliest on."""


class Chunk(_Line):
    """One line of the engine's answer; the last one has a finish reason."""

    echo: str = ""
    """The prompt, before the first piece, where it was asked for."""
    text: str = ""
    scores: list[TokenScore] = []
    """Of the echoed prompt and of the tokens of this piece, where they were asked for."""
    class_scores: dict[str, float] = {}
    """Of a classifier's answer, the probability of each class."""
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None
    """Why generation ended early; nothing follows."""
    field: str | None = None
    """Of a request that cannot be served, what is wrong with it."""


class Refused(Exception):
    """The engine cannot serve this request at all."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class EngineLost(Exception):
    """The engine died or broke before its answer was complete."""


class Call(_Line):
    """A line of the API server's."""

    number: int
    request: GenerateRequest | None = None
    """None: nobody waits for the answer to this number any more; or, of a new number, whether the
    engine is there, which it answers with what computes."""


class Reply(_Line):
    """A line of the engine's."""

    number: int
    """Of the call that it answers."""
    chunk: Chunk


class Channel:
    """The API server's end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Listen to an engine that is being started."""
        self._reader, self._writer = reader, writer
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Queue[Chunk | None]] = {}
        self.heard = monotonic()
        """When the engine last said something other than an error, which it may also say while the
        server behind it is gone."""
        self.why_ended = ENDED
        self.ended = asyncio.create_task(self._listen())
        """Done when the engine has closed its end, as the kernel does for one that dies."""

    async def _listen(self) -> None:
        try:
            while line := await self._reader.readline():
                reply = Reply.model_validate_json(line)
                if reply.chunk.error is None:
                    self.heard = monotonic()
                # Pieces may still come of a call that was given up, which nobody waits for.
                if replies := self._replies.get(reply.number):
                    replies.put_nowait(reply.chunk)
        except OSError:
            pass  # It died with calls unread.
        finally:
            # Ends every call that still waits.
            for replies in self._replies.values():
                replies.put_nowait(None)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Yield the answer as it is written.

        Raises:
            Refused: the request can never be served by this model.
            EngineLost: the engine ended before the answer did.
        """
        with self._call(request) as replies:
            is_last = False
            while not is_last:
                chunk = await self._next(replies)
                is_last = chunk.finish_reason is not None
                yield chunk

    async def check(self) -> str:
        """What computes, once the model is loaded and whenever the engine is alive; raises
        EngineLost."""
        with self._call(None) as replies:
            return (await self._next(replies)).text

    async def _next(self, replies: "asyncio.Queue[Chunk | None]") -> Chunk:
        if (chunk := await replies.get()) is None:
            raise EngineLost(self.why_ended)
        if chunk.error is not None and chunk.field is not None:
            raise Refused(chunk.error, chunk.field)
        if chunk.error is not None:
            raise EngineLost(chunk.error)
        return chunk

    @contextmanager
    def _call(self, request: GenerateRequest | None) -> Iterator["asyncio.Queue[Chunk | None]"]:
        """Replies to a request; where whoever waits for them leaves, the engine is told so."""
        if self.ended.done():
            raise EngineLost(self.why_ended)
        number, replies = next(self._numbers), asyncio.Queue[Chunk | None]()
        self._replies[number] = replies
        try:
            self._say(Call(number=number, request=request))
            yield replies
        except BaseException:
            # Whoever waited was canceled, say: the engine need not go on for nobody.
            self._say(Call(number=number))
            raise
        finally:
            del self._replies[number]

    def _say(self, call: Call) -> None:
        if not self.ended.done():
            self._writer.write(call.model_dump_json(exclude_defaults=True).encode() + b"\n")

    def close(self) -> None:
        """Stop listening; the engine ends where it did not."""
        self.ended.cancel()
        self._writer.close()
