"""Keep libraries' progress bars and start-up remarks out of a log that people read."""

import logging
import os
import warnings


def silence_libraries() -> None:
    """Leave only errors of transformers, its hub client, DeepSpeed, XLA; call before their use."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # accelerate imports DeepSpeed where it is installed, which then remarks on the accelerator.
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if os.path.exists("/dev/nvidia0") else "cpu")
    # DCP says on every call that one process alone is saving or reading.
    warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")
    # Said of what torchdata and DeepSpeed call in torch.
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")
    warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated")
    # Said by torchtune's sharded recipes on a processor, where adapters begin with random numbers.
    warnings.filterwarnings("ignore", "DTensor random operators")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for name in ("DeepSpeed", "torch.distributed", "torchao"):
        logging.getLogger(name).setLevel(logging.ERROR)
