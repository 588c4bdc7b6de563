"""A causal language model behind transformers' continuous batching."""

import asyncio
import uuid
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from serving.engine import attention
from serving.engine.protocol import GenerateRequest
from serving.engine.sampling import sample_per_request
from serving.engine.served_model import GenerationFailed, ServedModel, end_tokens_of, read_model

BLOCK_TOKENS = 32
BATCH_TOKENS = 256


class CausalModel(ServedModel):
    """Requests join and leave the running batch at every token."""

    def __init__(self, folder: Path, cache_tokens: int) -> None:
        """Load the model.

        Args:
            folder: a Hugging Face folder with safetensors.
            cache_tokens: tokens of all requests together whose keys and values are kept.

        Raises:
            UserError: the folder holds no model that can be read.
        """
        from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

        self.tokenizer, model = read_model(folder, AutoModelForCausalLM)
        self.context_tokens = min(model.config.max_position_embeddings, cache_tokens - BLOCK_TOKENS)
        self.end_tokens = end_tokens_of(model)
        config = GenerationConfig(
            do_sample=False, eos_token_id=self.end_tokens, pad_token_id=self.end_tokens[0]
        )
        self.batch = model.init_continuous_batching(
            generation_config=config,
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=BLOCK_TOKENS,
                num_blocks=cache_tokens // BLOCK_TOKENS,
                max_batch_tokens=BATCH_TOKENS,
            ),
        )
        sample_per_request(self.batch)
        attention.register()
        model.set_attn_implementation(attention.NAME)

    def start(self) -> None:
        self.batch.start()

    @property
    def fault(self) -> str | None:
        error = self.batch.background_thread_status.fatal_error
        if error is not None:
            return str(error)
        return None if self.batch.is_running() else "the generation thread has ended"

    async def write(
        self, request: GenerateRequest, tokens: list[int]
    ) -> AsyncGenerator[tuple[list[int], bool], None]:
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        name = uuid.uuid4().hex
        self.batch.register_result_handler(name, outputs.put_nowait)
        written, finished = 0, False
        try:
            accepted = self.batch.add_request(
                [*tokens, *self.encode_written(request)],
                request_id=name,
                max_new_tokens=request.max_tokens,
                streaming=request.stream or bool(request.stop),
                eos_token_id=self.end_tokens,
                temperature=float(request.temperature),
                top_p=float(request.top_p),
            )
            if accepted is None:
                raise GenerationFailed("the engine takes no more requests")
            while not finished:
                output = await outputs.get()
                if output.error is not None:
                    raise GenerationFailed(output.error)
                finished = output.is_finished()
                yield output.generated_tokens[written:], finished
                written = len(output.generated_tokens)
        finally:
            if not finished:
                self.batch.cancel_request(name)
            with self.batch.output_router._lock:
                self.batch.output_router.result_handlers.pop(name, None)
