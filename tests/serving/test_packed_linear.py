"""Linear layers in oneDNN's layout compute what they computed before."""

import pytest
import torch
from torch import nn

from serving.engine.packed_linear import PackedLinear, pack_linear_layers

pytestmark = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="this machine's oneDNN does not take bfloat16",
)


@pytest.mark.parametrize("rows", [1, 8, 77])
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_packed_layer_gives_the_plain_layers_product(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(96, 160, bias=bias, dtype=torch.bfloat16)
    given = torch.randn(1, rows, 96, dtype=torch.bfloat16)
    packed = PackedLinear(plain)(given)
    assert packed.dtype == torch.bfloat16 and packed.shape == (1, rows, 160)
    exact = nn.functional.linear(
        given.float(), plain.weight.float(), plain.bias.float() if bias else None
    )
    torch.testing.assert_close(packed.float(), exact, rtol=2**-7, atol=2**-8)


def test_every_bfloat16_layer_is_packed_and_no_other() -> None:
    inner = nn.Sequential(nn.Linear(8, 8, dtype=torch.bfloat16), nn.LayerNorm(8))
    model = nn.Sequential(inner, nn.Linear(8, 8), nn.Embedding(4, 8, dtype=torch.bfloat16))
    pack_linear_layers(model)
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(PackedLinear) == 1 and kinds.count(nn.Linear) == 1
    assert isinstance(inner[0], PackedLinear)
