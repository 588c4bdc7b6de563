"""One request on its way through an engine's thread."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from serving.engine.protocol import GenerateRequest
from serving.engine.served_model import GenerationFailed, Step


@dataclass(eq=False, kw_only=True)
class Job:
    """The engine's thread puts steps in, the event loop that made the job takes them out."""

    request: GenerateRequest
    prompt: list[int]
    finished: bool = False
    """Whether the last step was taken out."""
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _outputs: asyncio.Queue[Step | str] = field(default_factory=asyncio.Queue)

    def put(self, output: Step | str) -> None:
        """Hand over a step, or why there will be none; from any thread."""
        self._loop.call_soon_threadsafe(self._outputs.put_nowait, output)

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Every step to the last; raises GenerationFailed with the reason where none comes."""
        while not self.finished:
            output = await self._outputs.get()
            if isinstance(output, str):
                raise GenerationFailed(output)
            self.finished = output.finished
            yield output
