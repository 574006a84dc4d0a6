"""Triton kernels on a CPU, by Triton's interpreter: tests/conftest.py sets TRITON_INTERPRET.

Some of its operations are replaced. `tl.dot` took bfloat16 for integers, and numpy's product sums
in an order that depends on the shape: this one sums in float32, in ascending order of k, so that
the result of a kernel depends only on its own order of operations. Casts to bfloat16 cut the bits
off: these round to nearest even. Overflow and NaN cause no warning, as on a device. The
interpreter's replacements for Triton's language stay in place: installing them took a fourth of
its time.
"""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import _patch_lang

NP_TYPES = {tl.float16: np.float16, tl.float32: np.float32, tl.float64: np.float64}


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
    for k in range(left.shape[-1]):
        total = total + left[..., k, None] * right[..., k, None, :]
    return interpreter.TensorHandle(total, d.dtype.scalar)


_plain_cast = interpreter.InterpreterBuilder.cast_impl


def _rounding_cast(self: Any, source: Any, target: Any) -> Any:
    kinds = source.dtype.scalar, target.scalar
    if tl.bfloat16 not in kinds or kinds[0] == kinds[1]:
        return _plain_cast(self, source, target)
    values = _widened(source) if kinds[0] == tl.bfloat16 else source.data
    if kinds[1] != tl.bfloat16:
        return interpreter.TensorHandle(values.astype(NP_TYPES[kinds[1]]), kinds[1])
    return interpreter.TensorHandle(_bf16_bits(values).astype(np.uint16), kinds[1])


def _inline_asm(
    self: Any, asm: str, constraints: str, args: list[Any], types: list[Any], pure: bool, pack: int
) -> Any:
    """Run PTX that makes bfloat16 from 16-bit numbers, two in a register: four of its
    instructions.
    """
    registers = {
        f"${n}": np.ascontiguousarray(arg.data).view(np.uint32) for n, arg in enumerate(args, 1)
    }

    def value(word: str) -> Any:
        return registers[word] if word in registers else np.uint32(int(word, 0))

    for line in asm.strip("{} \n").split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        result, *operands = (word.strip() for word in rest.split(","))
        if name == "lop3.b32":
            assert int(operands.pop(), 0) == 0xEA  # a & b | c
        a, *others = map(value, operands)
        match name:
            case "mov.b32":
                registers[result] = a
            case "shr.b32":
                registers[result] = a >> others[0]
            case "lop3.b32":
                registers[result] = a & others[0] | others[1]
            case "fma.rn.bf16x2":
                registers[result] = _pairs_fma(a, *others)
            case _:
                raise NotImplementedError(name)
    return _AsmResult(registers["$0"].view(np.uint16))


class _AsmResult:
    def __init__(self, data: Any) -> None:
        self._data = data

    def get_result(self, number: int) -> Any:
        return interpreter.TensorHandle(self._data, tl.bfloat16)


def _pairs_fma(a: Any, b: Any, c: Any) -> Any:
    """Compute on pairs of bfloat16, rounded once to float32 and then to bfloat16."""
    halves = []
    for shift in (0, 16):
        x, y, z = (
            ((word >> np.uint32(shift)) << np.uint32(16)).view(np.float32).astype(np.float64)
            for word in np.broadcast_arrays(a, b, c)
        )
        halves.append(_bf16_bits((x * y + z).astype(np.float32)) << np.uint32(shift))
    return halves[0] | halves[1]


def _bf16_bits(values: Any) -> Any:
    """Return uint32 of float32, rounded to nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded)


class _Kept:
    """A change that is not reverted."""

    def restore(self) -> None: ...


_patched: set[Any] = set()


def _patch_once(fn: Any) -> _Kept:
    if fn not in _patched:
        _patch_lang(fn)
        _patched.add(fn)
    return _Kept()


_launch = interpreter.GridExecutor.__call__


def _quiet_launch(self: Any, *args: Any, **kwargs: Any) -> None:
    with np.errstate(all="ignore"):
        _launch(self, *args, **kwargs)


interpreter._patch_lang = _patch_once
interpreter.InterpreterBuilder.create_dot = _ordered_dot
interpreter.InterpreterBuilder.cast_impl = _rounding_cast
interpreter.InterpreterBuilder.create_inline_asm = _inline_asm
interpreter.GridExecutor.__call__ = _quiet_launch
