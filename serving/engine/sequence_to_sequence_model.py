"""An encoder-decoder model, such as T5 or BART.

The prompt is the encoder's input and the answer the decoder's. transformers batches such models for
requests that come together only, so the loop over tokens is here: requests that wait are encoded as
one batch, each is sampled by its own temperature and top-p, and each is answered as it is written.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from serving.engine.protocol import GenerateRequest
from serving.engine.sampling import choose_tokens
from serving.engine.served_model import GenerationFailed, ServedModel, end_tokens_of, read_model

BATCH_REQUESTS = 16
DEFAULT_CONTEXT_TOKENS = 1024


@dataclass(eq=False)
class _Job:
    """One request in the batch."""

    request: GenerateRequest
    tokens: list[int]
    written: list[int]
    loop: asyncio.AbstractEventLoop
    outputs: asyncio.Queue[tuple[list[int], bool] | str] = field(default_factory=asyncio.Queue)
    count: int = 0
    done: bool = False

    def put(self, output: tuple[list[int], bool] | str) -> None:
        self.loop.call_soon_threadsafe(self.outputs.put_nowait, output)


class SequenceToSequenceModel(ServedModel):
    """Requests that wait at the same time are answered as one batch."""

    def __init__(self, folder: Path, cache_tokens: int) -> None:
        """Load the model.

        Args:
            folder: a Hugging Face folder with safetensors.
            cache_tokens: most tokens of a prompt and its answer.

        Raises:
            UserError: the folder holds no model that can be read.
        """
        from transformers import AutoModelForSeq2SeqLM

        self.tokenizer, self._model = read_model(folder, AutoModelForSeq2SeqLM)
        config = self._model.config
        # T5's positions are relative, and it names no limit.
        positions = getattr(config, "max_position_embeddings", None) or DEFAULT_CONTEXT_TOKENS
        self.context_tokens = min(positions, cache_tokens)
        self.end_tokens = end_tokens_of(self._model)
        self._start_token = self._model.generation_config.decoder_start_token_id
        self._pad_token = config.pad_token_id or 0
        self._waiting: queue.Queue[_Job] = queue.Queue()
        self._thread = threading.Thread(target=self._answer, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def fault(self) -> str | None:
        return None if self._thread.is_alive() else "the generation thread has ended"

    async def write(
        self, request: GenerateRequest, tokens: list[int]
    ) -> AsyncGenerator[tuple[list[int], bool], None]:
        job = _Job(request, tokens, self.encode_written(request), asyncio.get_running_loop())
        self._waiting.put(job)
        finished = False
        try:
            while not finished:
                output = await job.outputs.get()
                if isinstance(output, str):
                    raise GenerationFailed(output)
                finished = output[1]
                yield output
        finally:
            job.done = True

    def _answer(self) -> None:
        held: list[_Job] = []
        while True:
            held = held or [self._waiting.get()]
            while not self._waiting.empty():
                held.append(self._waiting.get())
            # The decoder's beginnings form one rectangle: those of one length go together.
            length = len(held[0].written)
            batch = [job for job in held if len(job.written) == length][:BATCH_REQUESTS]
            held = [job for job in held if job not in batch]
            try:
                self._write(batch)
            except Exception as error:
                for job in batch:
                    job.put(f"{type(error).__name__}: {error}")

    @torch.inference_mode()
    def _write(self, jobs: list[_Job]) -> None:
        """Write all answers of a batch to their ends."""
        prompts = [torch.tensor(job.tokens) for job in jobs]
        inputs = pad_sequence(prompts, batch_first=True, padding_value=self._pad_token)
        mask = pad_sequence([torch.ones_like(prompt) for prompt in prompts], batch_first=True)
        encoded = self._model.get_encoder()(input_ids=inputs, attention_mask=mask)
        temperatures = torch.tensor([float(job.request.temperature) for job in jobs])
        top_p = torch.tensor([float(job.request.top_p) for job in jobs])
        step = torch.tensor([[self._start_token, *job.written] for job in jobs])
        cache: Any = None
        while not all(job.done for job in jobs):
            outputs = self._model(
                encoder_outputs=encoded,
                attention_mask=mask,
                decoder_input_ids=step,
                past_key_values=cache,
                use_cache=True,
            )
            cache = outputs.past_key_values
            chosen = choose_tokens(outputs.logits[:, -1].float(), temperatures, top_p)
            step = chosen.unsqueeze(1)
            for job, token in zip(jobs, chosen.tolist(), strict=True):
                self._hand_out(job, token)

    def _hand_out(self, job: _Job, token: int) -> None:
        if job.done:
            return
        job.count += 1
        job.done = token in self.end_tokens or job.count >= job.request.max_tokens
        job.put(([token], job.done))
