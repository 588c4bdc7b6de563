"""The smallest job, `python -m recipes.smoke --spec spec.json`: what image and machine have."""

import json
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.program.entry import PROBE, UPLOADED, SmokeSpec, run_program
from artifacts.progress import Report
from artifacts.storage import files
from recipes.launcher.environment import PREFIX
from recipes.spec import RESULT_NAME

if TYPE_CHECKING:
    from recipes.distributed.workers import Workers


def run(spec: SmokeSpec, report: Report) -> dict[str, Any] | None:
    """Versions, accelerators, a training step of all processes, and how the mounted bucket behaves.

    The first process writes that as the result, and beside it a model of no use, to be served.
    """
    import torch

    from recipes.distributed.workers import join_workers, leave_workers

    workers = join_workers()
    try:
        is_trained = _train_step(workers)
    finally:
        leave_workers()
    if not workers.is_rank_zero:
        return None
    report(f"torch {torch.__version__} runs, in {workers.described}")
    if spec.model:
        _write_model(Path(spec.output) / Path(spec.model).name)
    folder = Path(spec.output) / "mounted"
    folder.mkdir(parents=True)
    (folder / "probe").write_bytes(PROBE)
    # The variables that the launcher has filled from Secret Manager.
    secrets = [key.removeprefix(PREFIX) for key in os.environ if key.startswith(PREFIX)]
    result = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "accelerators": torch.cuda.device_count(),
        "secrets": sorted(name for name in secrets if os.environ.get(name)),
        "bucket": (folder / "probe").read_bytes() == PROBE,
        "shows_uploaded": (Path(spec.output) / UPLOADED).exists(),
        "renames_folders": _renames(folder),
        "trained": is_trained,
        "processes": workers.count,
    }
    files.write(f"{spec.output}/{RESULT_NAME}", json.dumps(result).encode())
    return result


def _train_step(workers: "Workers") -> bool:
    """Whether a step for which the gradients of all processes are summed does what it should."""
    import torch
    import torch.distributed as dist

    weight = torch.zeros(1, device=workers.device, requires_grad=True)
    (weight * (workers.rank + 1)).sum().backward()
    if workers.count > 1:
        dist.all_reduce(weight.grad)
    torch.optim.SGD([weight], lr=1.0).step()
    # The gradient of each rank is its number plus one, and the learning rate is 1.
    return weight.item() == -sum(range(workers.count + 1))


def _write_model(folder: Path) -> None:
    """A model with random weights, of a size that any engine takes, and a token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>"]
    tokenizer = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=tokens[-1], model_max_length=256
    ).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=len(tokens) - 1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def _renames(folder: Path) -> bool:
    """Whether the mount renames folders, which it does in hierarchical buckets alone."""
    try:
        folder.rename(folder.with_name("renamed"))
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(run_program(SmokeSpec, run))
