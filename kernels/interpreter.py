"""Runs Triton kernels on the CPU, one program after the other, through Triton's interpreter.

For tests: ``TRITON_INTERPRET=1``, set before a kernel's module is imported, makes ``triton_call``
come here. float32 and float16 only; the interpreter keeps bfloat16 as bare bits and multiplies
those.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray


class _Tensor:
    """A numpy array, as far as the interpreter looks at the torch tensors that it expects."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array
        self.dtype = str(array.dtype)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> _Tensor:
        return self

    def cpu(self) -> _Tensor:
        return self

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides

    def new_empty(self, *_: Any, **__: Any) -> _Tensor:
        return _Tensor(self.array)

    def set_(self, storage: _Tensor, *_: Any) -> None:
        self.array = storage.array

    def copy_(self, other: _Tensor) -> None:
        assert self.array is other.array, "the interpreter works on the arrays themselves"


def interpret(
    arguments: tuple[jax.Array | int, ...],
    kernel: Any,
    out_type: Any,
    grid: tuple[int, ...],
    in_place: tuple[int, ...],
    constants: dict[str, Any],
) -> tuple[Any, list[Any]]:
    """The outputs of a kernel, and its operands ``in_place`` as it left them."""
    types, tree = jax.tree.flatten(out_type)
    arrays = {i: x for i, x in enumerate(arguments) if not isinstance(x, int)}
    updated = [jax.ShapeDtypeStruct(arrays[i].shape, arrays[i].dtype) for i in in_place]

    def run(*inputs: Any) -> list[NDArray[Any]]:
        operands = {i: np.array(x) for i, x in zip(arrays, inputs, strict=True)}
        # What a kernel does not write is poison, not zero.
        outputs = [
            np.full(t.shape, np.nan if np.issubdtype(t.dtype, np.floating) else -1, t.dtype)
            for t in types
        ]
        given = [_Tensor(operands[i]) if i in operands else x for i, x in enumerate(arguments)]
        kernel[grid](*given, *map(_Tensor, outputs), **constants)
        return [*outputs, *(operands[i] for i in in_place)]

    results = jax.pure_callback(run, [*types, *updated], *arrays.values())
    return jax.tree.unflatten(tree, results[: len(types)]), list(results[len(types) :])
