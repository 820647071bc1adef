"""The Triton code of matrix products of few rows; how they are launched says matmul.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def matmul_kernel(
    x_ptr,  # (M, K)
    w_ptr,  # (K, N)
    M,
    out_ptr,  # (SPLIT, M, N)
    N: tl.constexpr,
    K: tl.constexpr,
    SPLIT: tl.constexpr,  # parts that K is cut into
    ROWS: tl.constexpr,  # rows of a tile: a power of two, at least 16
    COLUMNS: tl.constexpr,  # of a tile
    DEPTH: tl.constexpr,  # of K, in an iteration
):
    """One part of the sums of one tile of ``x @ w``."""
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    m = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    EVEN: tl.constexpr = K % (DEPTH * SPLIT) == 0
    STEPS: tl.constexpr = (K + DEPTH * SPLIT - 1) // (DEPTH * SPLIT)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(STEPS):
        k = (part * STEPS + step) * DEPTH + tl.arange(0, DEPTH)
        x_at = x_ptr + m[:, None] * K + k[None, :]
        w_at = w_ptr + k[:, None].to(tl.int64) * N + n[None, :]
        if EVEN and N % COLUMNS == 0:
            x = tl.load(x_at, mask=(m < M)[:, None], other=0.0)
            w = tl.load(w_at)
        else:
            x = tl.load(x_at, mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
            w = tl.load(w_at, mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
        acc = tl.dot(x, w, acc)
    out_at = out_ptr + (part * M + m[:, None]) * N + n[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def gated_kernel(
    x_ptr,  # (M, K)
    w_ptr,  # (K, 2, N): gate, up
    M,
    out_ptr,  # (M, N)
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One tile of ``silu(x @ gate) * (x @ up)``."""
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    EVEN: tl.constexpr = K % DEPTH == 0
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k0 in range(0, K, DEPTH):
        k = k0 + tl.arange(0, DEPTH)
        x_at = x_ptr + m[:, None] * K + k[None, :]
        w_at = w_ptr + k[:, None].to(tl.int64) * (2 * N) + n[None, :]
        if EVEN and N % COLUMNS == 0:
            x = tl.load(x_at, mask=(m < M)[:, None], other=0.0)
            w_gate = tl.load(w_at)
            w_up = tl.load(w_at + N)
        else:
            x = tl.load(x_at, mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
            real = (k < K)[:, None] & (n < N)[None, :]
            w_gate = tl.load(w_at, mask=real, other=0.0)
            w_up = tl.load(w_at + N, mask=real, other=0.0)
        gate = tl.dot(x, w_gate, gate)
        up = tl.dot(x, w_up, up)
    # Rounded where XLA's product is, before it is activated.
    element = out_ptr.dtype.element_ty
    gate = gate.to(element).to(tl.float32)
    up = up.to(element).to(tl.float32)
    silu = (gate / (1 + tl.exp(-gate))).to(element).to(tl.float32)
    out_at = out_ptr + m[:, None] * N + n[None, :]
    tl.store(out_at, (silu * up).to(element), mask=(m < M)[:, None] & (n < N)[None, :])
