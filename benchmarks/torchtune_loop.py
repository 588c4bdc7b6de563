"""The step of torchtune's full fine-tuning recipe for one device, as a peer of `train_gpu`.

Model builder, chunked loss, compiling and the order of the step are torchtune's own, as its recipe
`full_finetune_single_device` puts them together; the weights are bfloat16 throughout, which is that
recipe's default and leaves it less to do than mixed precision does.
"""

import time
from collections.abc import Callable

import torch

from recipes.model.decoder import DecoderShape


def train_with_torchtune(
    shape: DecoderShape,
    rows: torch.Tensor,
    learning_rate: float,
    synchronize: Callable[[], None],
) -> tuple[torch.nn.Module, list[float], float]:
    """`(model, seconds of each step, last loss)`.

    Args:
        shape: sizes with tied embeddings and unscaled rotary positions.
        rows: tokens of shape (steps, rows, sequence_length), on the device to train on.
        learning_rate: AdamW's.
        synchronize: waits for the device.
    """
    from torchtune import training
    from torchtune.models.llama3_2 import llama3_2
    from torchtune.modules.loss import CEWithChunkedOutputLoss

    device = rows.device
    with training.set_default_dtype(torch.bfloat16), device:
        model = llama3_2(
            vocab_size=shape.vocab_size,
            num_layers=shape.layers,
            num_heads=shape.heads,
            num_kv_heads=shape.key_value_heads,
            embed_dim=shape.hidden_size,
            max_seq_len=rows.shape[-1],
            rope_base=int(shape.rope["rope_theta"]),
            intermediate_dim=shape.intermediate_size,
            norm_eps=shape.norm_eps,
            scale_factor=1,
        )
    for parameter in model.parameters():
        if parameter.ndim == 2:
            # The builders leave weights for a checkpoint to fill.
            torch.nn.init.normal_(parameter, std=shape.initializer_range)
    loss_function = CEWithChunkedOutputLoss()
    model.set_num_output_chunks(loss_function.num_output_chunks)
    if device.type == "cuda":
        training.compile_model(model)
        training.compile_loss(loss_function)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)
    ignored = torch.full((rows.shape[1], 1), loss_function.ignore_index, device=device)
    seconds, loss = [], torch.zeros(())
    for tokens in rows:
        synchronize()
        began = time.perf_counter()
        labels = torch.hstack((tokens[:, 1:], ignored))
        targets = (labels != loss_function.ignore_index).sum()
        loss = loss_function(model(tokens), labels)
        (loss * targets).backward()
        training.scale_grads(model, 1 / targets)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize()
        seconds.append(time.perf_counter() - began)
    return model, seconds, float(loss.detach())
