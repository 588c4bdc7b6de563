"""llama.cpp's own server, without a compiler: serves a folder of a Llama with byte-level BPE.

`python -m tests.stand_ins.llama_server FOLDER PORT`.
"""

import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import xllamacpp
from gguf import MODEL_ARCH, GGUFWriter, TokenType, get_tensor_name_map
from safetensors.numpy import load_file


def write_gguf(folder: Path, path: Path) -> None:
    """A Hugging Face folder's config, tokenizer and weights in llama.cpp's format, in float32."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    writer = GGUFWriter(path, "llama")
    heads, key_value_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_value_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    _add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()), config)
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, weight in load_file(folder / "model.safetensors").items():
        # Of each pair that is turned together, llama.cpp has the halves beside each other.
        if "q_proj" in name:
            weight = _interleaved(weight, heads)
        if "k_proj" in name:
            weight = _interleaved(weight, key_value_heads)
        told = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(told, weight.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: GGUFWriter, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    numbers: dict[str, int] = tokenizer["model"]["vocab"]
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    tokens = sorted(numbers | special, key=(numbers | special).__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    kinds = [TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens]
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def main(folder: Path, port: int) -> None:
    """Serve until this program is ended."""
    with tempfile.TemporaryDirectory() as written:
        path = Path(written) / "model.gguf"
        write_gguf(folder, path)
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(path)
        parameters.hostnames, parameters.port = ["127.0.0.1"], port
        parameters.n_parallel = 2
        # Threads of it that wait for each other keep the processor busy.
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
        # It begins to answer when its weights are read; the reference keeps it alive.
        server = xllamacpp.Server(parameters)
        signal.sigwait({signal.SIGTERM})
        del server


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
