"""Triton kernels on a CPU, by Triton's interpreter: tests/conftest.py sets TRITON_INTERPRET.

Its `tl.dot` is replaced: it took bfloat16 for integers, and numpy's product sums in an order that
depends on the shape. Ours sums in float32, in ascending order of k, as one multiply-add a step; so
what a kernel computes depends on its own order of operations alone.
"""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def _widened(operand: Any) -> Any:
    data = operand.data
    if operand.dtype == tl.bfloat16:  # its bits, as uint16
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32)


def _ordered_dot(
    self: Any, a: Any, b: Any, d: Any, input_precision: object, max_num_imprecise_acc: object
) -> Any:
    left, right = _widened(a), _widened(b)
    total = d.data.astype(np.float32)
    with np.errstate(all="ignore"):
        for k in range(left.shape[-1]):
            total = total + left[..., k, None] * right[..., k, None, :]
    return interpreter.TensorHandle(total, d.dtype.scalar)


interpreter.InterpreterBuilder.create_dot = _ordered_dot
