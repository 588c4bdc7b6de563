"""One of 64 workers loads Llama 3.1 8B and says how much memory that took."""

import json
import sys
import threading
from pathlib import Path

import psutil
import torch
from transformers import LlamaConfig

from recipes.distributed.sharding import shard
from recipes.model.causal_model import load_model
from recipes.model.decoder import Decoder, DecoderShape
from tests.recipes.conftest import fake_group

PROCESSES = 64
LOOK_SECONDS = 0.01


class PeakMemory:
    """The most bytes of this process's own, from here on.

    Pages of the weights' file, which it maps, are not its own: the kernel takes them back at need,
    and by how many more than were read it maps differs between file systems.
    """

    def __init__(self) -> None:
        self.bytes = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        process, pause = psutil.Process(), threading.Event()
        while not pause.wait(LOOK_SECONDS):
            memory = process.memory_info()
            self.bytes = max(self.bytes, memory.rss - memory.shared)


def write_holes(folder: Path) -> None:
    """A Hugging Face folder of the 8B whose weights take no room on the disk."""
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        weights = Decoder(DecoderShape.from_config(config)).state_dict()
    header, end = {}, 0
    for name, weight in weights.items():
        begin, end = end, end + 2 * weight.numel()
        header[name] = {"dtype": "BF16", "shape": weight.shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end)


def main() -> None:
    folder, peak = Path(sys.argv[1]), PeakMemory()
    write_holes(folder)
    with fake_group(PROCESSES, rank=5) as workers:
        model = load_model(folder, reads=False)
        shard(model, workers, 1, "float32")
        model.read_weights(workers.device)
        read = sum(tensor.to_local().numel() for tensor in model.state_dict().values())
    found = {"parameters": model.parameter_count, "read": read, "peak_gb": peak.bytes / 1e9}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
