"""Any language model that transformers knows, by its own `generate`: slow, and the reference."""

import queue
import threading
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    LogitsProcessor,
    StoppingCriteria,
)
from transformers.generation.streamers import BaseStreamer

from artifacts.errors import UserError
from artifacts.model_folder import end_tokens_of, read_config
from serving.engine.job import Job
from serving.engine.protocol import GenerateRequest
from serving.engine.sampling import choose_tokens
from serving.engine.served_model import (
    Scored,
    ServedModel,
    Step,
    read_tokenizer,
    read_weights,
)
from serving.settings import EndpointSettings

BATCH_REQUESTS = 8
DEFAULT_CONTEXT_TOKENS = 1024
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


@dataclass(eq=False, kw_only=True)
class _Job(Job):
    """One request in the batch."""

    written: list[int]
    prompt_scored: list[Scored] = field(default_factory=list)
    count: int = 0
    done: bool = False
    """Whether nothing more is to be generated: it has ended, or its client has gone."""


class TransformersModel(ServedModel):
    """Requests that wait at the same time are answered as one batch."""

    def __init__(self, folder: Path, settings: EndpointSettings) -> None:
        """Load the model of a Hugging Face folder with safetensors.

        Raises:
            UserError: the folder holds no model that can be read, or the weights are asked for in
                a format that this engine lacks.
        """
        if settings.weights not in DTYPES:
            raise UserError(
                f"`endpoint.weights` is {settings.weights}, which the engine `transformers` lacks: "
                f"it takes {' or '.join(DTYPES)}."
            )
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        self._is_encoder_decoder = bool(config.is_encoder_decoder)
        kind = AutoModelForSeq2SeqLM if self._is_encoder_decoder else AutoModelForCausalLM
        self.tokenizer = read_tokenizer(folder)
        self._model = read_weights(folder, kind, dtype=DTYPES[settings.weights])
        text = config.get_text_config(decoder=True)
        # T5's positions are relative, and it names no limit.
        positions = getattr(text, "max_position_embeddings", None) or DEFAULT_CONTEXT_TOKENS
        self.context_tokens = min(positions, settings.cache_tokens)
        self.end_tokens = end_tokens_of(read_config(folder))
        # Each row is ended by its own request. What `generate` is not told it takes from here.
        self._model.generation_config.eos_token_id = None
        self._pad_token = self._model.generation_config.pad_token_id or 0
        self._waiting: queue.Queue[_Job] = queue.Queue()
        self._thread = threading.Thread(target=self._answer, daemon=True)
        if settings.threads:
            torch.set_num_threads(settings.threads)

    def start(self) -> None:
        self._thread.start()

    @property
    def fault(self) -> str | None:
        return None if self._thread.is_alive() else "the generation thread has ended"

    async def write(
        self, request: GenerateRequest, tokens: list[int]
    ) -> AsyncGenerator[Step, None]:
        job = _Job(request=request, prompt=tokens, written=self.encode_written(request))
        self._waiting.put(job)
        try:
            async for step in job.steps():
                yield step
        finally:
            job.done = True

    def _answer(self) -> None:
        held: list[_Job] = []
        while True:
            held = held or [self._waiting.get()]
            while not self._waiting.empty():
                held.append(self._waiting.get())
            # A decoder's beginnings form one rectangle: those of one length go together.
            length = self._beginning(held[0])
            batch = [job for job in held if self._beginning(job) == length][:BATCH_REQUESTS]
            held = [job for job in held if job not in batch]
            try:
                self._write(batch)
            except Exception as error:
                for job in batch:
                    job.put(f"{type(error).__name__}: {error}")

    def _beginning(self, job: _Job) -> int:
        return len(job.written) if self._is_encoder_decoder else 0

    @torch.inference_mode()
    def _write(self, jobs: list[_Job]) -> None:
        """Write all answers of a batch to their ends."""
        for job in jobs:
            if job.request.echo and job.request.logprobs and not job.written:
                job.prompt_scored = self._score(job.prompt)
        most = max(job.request.max_tokens for job in jobs)
        if not most:
            for job in jobs:
                job.put(Step([], True, job.prompt_scored))
            return
        inputs = self._inputs(jobs)
        batch = _Batch(jobs, self.end_tokens, inputs["input_ids"].device)
        self._model.generate(
            **inputs,
            generation_config=GenerationConfig(
                max_new_tokens=most,
                do_sample=False,
                pad_token_id=self._pad_token,
                decoder_start_token_id=self._model.generation_config.decoder_start_token_id,
            ),
            logits_processor=[batch],
            stopping_criteria=[_Ends(batch)],
            streamer=batch,
        )

    def _inputs(self, jobs: list[_Job]) -> dict[str, torch.Tensor]:
        """The batch as `generate` takes it: a decoder's prompts end together, an encoder's begin
        together."""
        if self._is_encoder_decoder:
            side, start = "right", self._model.generation_config.decoder_start_token_id
            prompts = [torch.tensor(job.prompt) for job in jobs]
            beginnings = torch.tensor([[start, *job.written] for job in jobs])
            extra = {"decoder_input_ids": beginnings}
        else:
            side, extra = "left", {}
            prompts = [torch.tensor([*job.prompt, *job.written]) for job in jobs]
        padded = pad_sequence(prompts, True, self._pad_token, padding_side=side)
        ones = [torch.ones_like(prompt) for prompt in prompts]
        mask = pad_sequence(ones, True, 0, padding_side=side)
        return {"input_ids": padded, "attention_mask": mask, **extra}

    def _score(self, prompt: list[int]) -> list[Scored]:
        if self._is_encoder_decoder:
            return [Scored(token, None) for token in prompt]
        tokens = torch.tensor([prompt])
        logprobs = self._model(tokens, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        return [Scored(prompt[0], None), *_scored(logprobs, prompt[1:])]


class _Batch(LogitsProcessor, BaseStreamer):
    """Chooses the next token of each row as its request asks, and hands it out."""

    def __init__(self, jobs: list[_Job], end_tokens: list[int], device: torch.device) -> None:
        self.jobs = jobs
        self._end_tokens = end_tokens
        self._temperatures = torch.tensor([float(job.request.temperature) for job in jobs])
        self._top_p = torch.tensor([float(job.request.top_p) for job in jobs])
        self._generators = [_generator(job.request.seed) for job in jobs]
        self._logprobs: torch.Tensor | None = None
        self._begun = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Of logits, shape (rows, vocabulary), those alone that are chosen."""
        scores = scores.float()
        if any(job.request.logprobs for job in self.jobs):
            self._logprobs = scores.log_softmax(-1)
        chosen = choose_tokens(scores, self._temperatures, self._top_p, self._generators)
        return torch.full_like(scores, -torch.inf).scatter(-1, chosen[:, None], 0.0)

    def put(self, value: torch.Tensor) -> None:
        """Take the newest tokens, shape (rows,); what comes first is what was given."""
        if not self._begun:
            self._begun = True
            return
        for row, (job, token) in enumerate(zip(self.jobs, value.tolist(), strict=True)):
            if job.done:
                continue
            scored = job.prompt_scored if not job.count else []
            if job.request.logprobs and job.request.max_tokens and self._logprobs is not None:
                scored = scored + _scored(self._logprobs[row : row + 1], [token])
            job.count += 1
            ended = token in self._end_tokens and not job.request.ignore_eos
            job.done = ended or job.count >= job.request.max_tokens
            wanted = [token] if job.request.max_tokens else []
            job.put(Step(wanted, job.done, scored))

    def end(self) -> None:
        """Nothing is held back."""


class _Ends(StoppingCriteria):
    """Ends each row with its own request."""

    def __init__(self, batch: _Batch) -> None:
        self._batch = batch

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Whether each row is done."""
        return torch.tensor([job.done for job in self._batch.jobs], device=input_ids.device)


def _generator(seed: int | None) -> torch.Generator | None:
    return None if seed is None else torch.Generator().manual_seed(seed)


def _scored(logprobs: torch.Tensor, tokens: Sequence[int]) -> list[Scored]:
    """Scores of tokens, from log-probabilities of shape (tokens, vocabulary)."""
    tops, chosen = logprobs.max(-1), logprobs.gather(-1, torch.tensor(tokens)[:, None])
    rows = zip(tokens, chosen[:, 0].tolist(), *(part.tolist() for part in tops), strict=True)
    return [Scored(token, own, (top, likeliest)) for token, own, likeliest, top in rows]
