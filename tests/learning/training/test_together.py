"""What updates need of torch: gradients, and products in full, whatever an environment has left."""

import pytest
import torch

from dase_grpc.learning.training.together import with_torch_defaults

AMONG = torch.Generator().manual_seed(0)
X, Y = (torch.randn(256, 256, generator=AMONG) for _ in range(2))


def product():
    return torch.get_float32_matmul_precision(), torch.is_grad_enabled(), X @ Y


@pytest.fixture(params=["medium", "high"])
def rounded(request):
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision("highest")


def test_products_are_in_full_and_rounded_again_afterwards(rounded):
    with torch.inference_mode():
        precision, gradients, found = with_torch_defaults(product)()
    assert (precision, gradients) == ("highest", True)
    assert torch.get_float32_matmul_precision() == rounded
    torch.set_float32_matmul_precision("highest")
    assert torch.equal(found, X @ Y)


def test_they_are_rounded_again_where_the_work_fails(rounded):
    with pytest.raises(ZeroDivisionError):
        with_torch_defaults(lambda: 1 // 0)()
    assert torch.get_float32_matmul_precision() == rounded
