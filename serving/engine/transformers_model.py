"""What transformers computes: any language model that it knows, and encoders.

Language models run by its own `generate`, which is slow, and the reference. An encoder, such as a
fine-tuned RoBERTa, tells which class a text is, or what stands behind a mask. All run on GPUs where
torch sees any, which divide a large model.
"""

import asyncio
import queue
import secrets
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from transformers.generation.streamers import BaseStreamer

from artifacts.errors import UserError
from artifacts.model import context_tokens, end_tokens_of, read_config, read_model, read_tokenizer
from serving.engine import served_model
from serving.engine.protocol import Chunk, GenerateRequest, Refused
from serving.settings import EndpointSettings

BATCH_REQUESTS = 8
DEFAULT_CONTEXT_TOKENS = 1024
"""Of a language model that names no limit, such as T5."""
DEFAULT_POSITIONS = 512
"""Of an encoder that names none."""
MOST_LIKELY = 5
"""Tokens of a mask filler's answer."""


def read_weights(folder: Path, model_class: Any, **options: Any) -> Any:
    """A model for inference; raises UserError where it cannot be read, or is no good."""
    if torch.cuda.is_available():
        options["device_map"] = "auto"
    model = read_model(folder, model_class, **options)
    # Weights that no GPU has room for are kept elsewhere, and are empty here.
    weights = [pair for pair in model.named_parameters() if not pair[1].is_meta]
    damaged = [name for name, weight in weights if not weight.isfinite().all()]
    if damaged:
        raise UserError(
            f"The model in {folder} has weights that are not finite numbers ({damaged[0]}, "
            f"{len(damaged)} in all): its training went wrong. Serve an earlier checkpoint."
        )
    return model


def _load(folder: Path, model_class: Any, settings: EndpointSettings) -> Any:
    if settings.threads:
        torch.set_num_threads(settings.threads)
    dtype = torch.float32 if settings.weights == "f32" else torch.bfloat16
    return read_weights(folder, model_class, dtype=dtype)


@dataclass(eq=False, kw_only=True)
class _Generation(served_model.Job):
    """One request in the batch."""

    written: list[int]
    prompt_scored: list[served_model.TokenLikelihood] = field(default_factory=list)
    count: int = 0
    ended: bool = False

    @property
    def done(self) -> bool:
        """Whether nothing more is to be generated."""
        return self.ended or self.left


class TransformersModel(served_model.ServedModel):
    """Requests that wait at the same time are answered as one batch."""

    def __init__(self, folder: Path, settings: EndpointSettings) -> None:
        """Load the model of a Hugging Face folder with safetensors.

        Raises:
            UserError: the folder holds no model that can be read.
        """
        config = read_config(folder)
        self.is_encoder_decoder = bool(config.get("is_encoder_decoder"))
        name = "Seq2SeqLM" if self.is_encoder_decoder else "CausalLM"
        kind = getattr(transformers, f"AutoModelFor{name}")
        self.tokenizer = served_model.ServedTokenizer.of(read_tokenizer(folder))
        self._model = _load(folder, kind, settings)
        # T5's positions are relative, and it names no limit.
        positions = context_tokens(config) or DEFAULT_CONTEXT_TOKENS
        self.context_tokens = min(positions, settings.cache_tokens)
        self.end_tokens = end_tokens_of(config)
        # `generate` takes from here what it is not told, even an end that a request wants ignored.
        defaults = self._model.generation_config
        defaults.eos_token_id = None
        self._pad_token = defaults.pad_token_id or 0
        self._beams = defaults.num_beams or 1
        self._waiting: queue.Queue[_Generation] = queue.Queue()
        served_model.start_thread(self._answer)

    def submit(self, request: GenerateRequest, tokens: list[int]) -> served_model.Job:
        job = _Generation(request=request, prompt=tokens, written=self.encode_written(request))
        self._waiting.put(job)
        return job

    def _answer(self) -> None:
        pending: list[_Generation] = []
        while True:
            # Waits only while it holds nothing; what came meanwhile joins what is held.
            pending = pending or [self._waiting.get()]
            while not self._waiting.empty():
                pending.append(self._waiting.get())
            batch = self._batch(pending)
            pending = [job for job in pending if job not in batch]
            try:
                self._write(batch)
            except Exception as error:
                # The thread answers all requests, so a fault ends those of its batch and no others.
                for job in batch:
                    job.put(f"{type(error).__name__}: {error}")

    def _batch(self, pending: list[_Generation]) -> list[_Generation]:
        """The first request, and those that can be answered with it."""
        batch: list[_Generation] = []
        longest = most = 0
        for job in pending:
            if len(batch) == BATCH_REQUESTS or self._alike(job) != self._alike(pending[0]):
                continue
            beginning = max(longest, len(job.prompt) + len(job.written))
            tokens = max(most, job.request.max_tokens)
            # Every row goes on until the last answer ends, and has to have places until then.
            fits = self.is_encoder_decoder or beginning + tokens <= self.context_tokens
            if fits or not batch:
                batch.append(job)
                longest, most = beginning, tokens
        return batch

    def _alike(self, job: _Generation) -> tuple[object, ...]:
        """What the requests of one batch have in common.

        They are drawn in one way, and one with a seed of its own is drawn alone; or nothing is to
        be written. A decoder's beginnings form one rectangle, and it may be made to end at
        the last place, as beams are.
        """
        request, own_draw = job.request, job.request.seed is not None and id(job)
        most: tuple[int, ...] = (min(request.max_tokens, 1),)
        if self.is_encoder_decoder or self._beams > 1:
            most = (request.max_tokens, len(job.written))
        return (*most, request.temperature, request.top_p, own_draw, request.ignore_eos)

    @torch.inference_mode()
    def _write(self, jobs: list[_Generation]) -> None:
        """Write all answers of a batch to their ends."""
        for job in jobs:
            if job.request.echo and job.request.logprobs and not job.written:
                job.prompt_scored = self._scored_prompt(job)
        most = max(job.request.max_tokens for job in jobs)
        if not most:
            for job in jobs:
                job.put(served_model.Step([], True, job.prompt_scored))
            return
        batch, request = _Batch(jobs, self.end_tokens), jobs[0].request
        config = transformers.GenerationConfig(
            max_new_tokens=most,
            do_sample=request.temperature > 0,
            eos_token_id=None if request.ignore_eos else self.end_tokens or None,
            pad_token_id=self._pad_token,
            decoder_start_token_id=self._model.generation_config.decoder_start_token_id,
        )
        if self._beams > 1 and not request.temperature:
            self._search(jobs, config)
            return
        # Set explicitly, or `generate` would take the model's own number of beams here as well.
        config.num_beams = 1
        if request.temperature:
            # Unless told otherwise, transformers draws from the 50 most likely tokens alone.
            config.update(temperature=request.temperature, top_p=request.top_p, top_k=0)
            # Also without a seed of its own, or what it draws would follow from the seed of
            # another.
            torch.manual_seed(secrets.randbits(63) if request.seed is None else request.seed)
        self._model.generate(
            **self._inputs(jobs),
            generation_config=config,
            logits_processor=[batch],
            stopping_criteria=[batch.ends],
            streamer=batch,
        )

    def _search(self, jobs: list[_Generation], config: transformers.GenerationConfig) -> None:
        """Write the best of the model's beams, which is known at the end of the search."""

        def left(tokens: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            is_left = all(job.left for job in jobs)
            return torch.full((len(tokens),), is_left, device=tokens.device)

        inputs = self._inputs(jobs)
        outputs = self._model.generate(**inputs, generation_config=config, stopping_criteria=[left])
        before = inputs["decoder_input_ids" if self.is_encoder_decoder else "input_ids"].shape[1]
        ends = config.eos_token_id or ()
        for job, row in zip(jobs, outputs[:, before:].tolist(), strict=True):
            # What comes after an end fills the batch's rectangle.
            length = next((n + 1 for n, token in enumerate(row) if token in ends), len(row))
            scored = job.prompt_scored
            if job.request.logprobs:
                scored = scored + self._scored_answer(job, row[:length])
            job.put(served_model.Step(row[:length], True, scored))

    def _scored_prompt(self, job: _Generation) -> list[served_model.TokenLikelihood]:
        first, *rest = [served_model.TokenLikelihood(token, None) for token in job.prompt]
        if rest and not self.is_encoder_decoder:
            # A decoder's prompt is as if it had written all but the first token.
            rest = self._scored_answer(replace(job, prompt=job.prompt[:1]), job.prompt[1:])
        return [first, *rest]

    def _scored_answer(
        self, job: _Generation, tokens: list[int]
    ) -> list[served_model.TokenLikelihood]:
        alone = replace(job, written=[*job.written, *tokens[:-1]])
        logits = self._model(**self._inputs([alone]), use_cache=False).logits[0]
        logprobs = logits[-len(tokens) :].float().log_softmax(-1)
        return _scored(logprobs, tokens, job.request.top)

    def _inputs(self, jobs: list[_Generation]) -> dict[str, torch.Tensor]:
        """The batch as `generate` takes it: a decoder's prompts end together, an encoder's begin
        together."""
        if self.is_encoder_decoder:
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
        inputs = {"input_ids": padded, "attention_mask": mask, **extra}
        return {name: tensor.to(self._model.device) for name, tensor in inputs.items()}


class _Batch(transformers.LogitsProcessor, BaseStreamer):
    """Hands out the tokens of each row, with how likely they were, until its request is done."""

    def __init__(self, jobs: list[_Generation], end_tokens: list[int]) -> None:
        self.jobs = jobs
        self._end_tokens = end_tokens
        self._logprobs: torch.Tensor
        self._begun = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Note logits, shape (rows, vocabulary), before temperature and top-p change them."""
        if any(job.request.logprobs for job in self.jobs):
            self._logprobs = scores.float().log_softmax(-1)
        return scores

    def ends(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Whether each row is done."""
        return torch.tensor([job.done for job in self.jobs], device=input_ids.device)

    def put(self, value: torch.Tensor) -> None:
        """Take the newest tokens, shape (rows,); what comes first is what was given."""
        if not self._begun:
            self._begun = True
            return
        for row, (job, token) in enumerate(zip(self.jobs, value.tolist(), strict=True)):
            if job.done:
                continue
            scored = job.prompt_scored if not job.count else []
            if job.request.logprobs:
                scored = scored + _scored(self._logprobs[row : row + 1], [token], job.request.top)
            job.count += 1
            is_end = token in self._end_tokens and not job.request.ignore_eos
            job.ended = is_end or job.count >= job.request.max_tokens
            job.put(served_model.Step([token], job.ended, scored))

    def end(self) -> None:
        """Nothing is held back."""


def _scored(
    logprobs: torch.Tensor, tokens: Sequence[int], top: int
) -> list[served_model.TokenLikelihood]:
    """Scores of tokens, from log-probabilities of shape (tokens, vocabulary)."""
    places = torch.tensor(tokens, device=logprobs.device)
    likely, scores = logprobs.topk(top), logprobs.gather(-1, places[:, None])
    rows = zip(tokens, scores[:, 0].tolist(), *(part.tolist() for part in likely), strict=True)
    return [
        served_model.TokenLikelihood(token, logprob, list(zip(numbers, values, strict=True)))
        for token, logprob, values, numbers in rows
    ]


class Classifier(served_model.AnyModel):
    """Answers a text with its most likely class, and how likely each is."""

    kind = "AutoModelForSequenceClassification"
    what = "This model classifies texts; use /predict."

    def __init__(self, folder: Path, settings: EndpointSettings) -> None:
        """Load the model.

        Raises:
            UserError: the folder holds no model of this kind, or one that cannot be read.
        """
        self._tokenizer = read_tokenizer(folder)
        self._model = _load(folder, getattr(transformers, self.kind), settings)
        self._limit = context_tokens(self._model.config.to_dict()) or DEFAULT_POSITIONS
        self._thread = ThreadPoolExecutor(1, "classifier")

    def encode(self, request: GenerateRequest) -> list[int]:
        """The text's tokens; raises Refused where it cannot be answered."""
        if not isinstance(request.prompt, str):
            raise Refused(self.what, "messages")
        tokens = list(self._tokenizer.encode(request.prompt))
        limit = min(self._limit, request.max_prompt_tokens)
        if len(tokens) > limit:
            raise Refused(f"The text has {len(tokens)} tokens; at most {limit} fit.", "prompt")
        return tokens

    async def generate(
        self, request: GenerateRequest, tokens: list[int]
    ) -> AsyncGenerator[Chunk, None]:
        """One piece: the label, with the probability of every one."""
        loop = asyncio.get_running_loop()
        scores = await loop.run_in_executor(self._thread, self._scores, tokens)
        yield Chunk(
            text=max(scores, key=scores.__getitem__),
            class_scores=scores,
            finish_reason="stop",
            prompt_tokens=len(tokens),
            completion_tokens=1,
        )

    def _logits(self, tokens: list[int]) -> torch.Tensor:
        inputs = torch.tensor([tokens], device=self._model.device)
        logits: torch.Tensor = self._model(inputs).logits[0].float()
        return logits

    @torch.inference_mode()
    def _scores(self, tokens: list[int]) -> dict[str, float]:
        logits = self._logits(tokens)
        labels = self._model.config.id2label
        return {labels[n]: round(share, 6) for n, share in enumerate(logits.softmax(0).tolist())}


class MaskFiller(Classifier):
    """Answers a text with one mask token by the most likely tokens in its place.

    A text without one, such as a rollout's probe, is told what comes after it.
    """

    kind = "AutoModelForMaskedLM"
    what = "This model fills in a mask token; use /predict."

    def encode(self, request: GenerateRequest) -> list[int]:
        """The text's tokens, with a mask at its end where there is none; raises Refused."""
        mask = self._tokenizer.mask_token
        if isinstance(request.prompt, str) and mask and mask not in request.prompt:
            request = request.model_copy(update={"prompt": f"{request.prompt} {mask}"})
        tokens = super().encode(request)
        masks = tokens.count(self._tokenizer.mask_token_id)
        if masks != 1:
            text = f"The text has {masks} mask tokens ({mask}); exactly one is expected."
            raise Refused(text, "prompt")
        return tokens

    @torch.inference_mode()
    def _scores(self, tokens: list[int]) -> dict[str, float]:
        logits = self._logits(tokens)
        place = tokens.index(self._tokenizer.mask_token_id)
        best = logits[place].softmax(dim=0).topk(MOST_LIKELY)
        scores: dict[str, float] = {}
        for token, share in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            # Tokens that are parts of a character read alike.
            text = self._tokenizer.decode([token])
            scores[text] = round(scores.get(text, 0.0) + share, 6)
        return scores
