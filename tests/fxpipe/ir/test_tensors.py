import torch

from fxpipe.ir.tensors import tensor_bytes


def test_bytes_of_any_pytree():
    value = {"a": torch.zeros(3), "b": [torch.zeros(2, dtype=torch.int64), None, 5]}
    assert tensor_bytes(value) == 3 * 4 + 2 * 8
