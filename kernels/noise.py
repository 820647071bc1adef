"""Gumbel noise in Triton: the generator of ``jllm/models/rng.py``, bit for bit."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def philox_key(seeds_ptr, row):
    """The 64-bit seed of a row of (B, 2) uint32, low and high word."""
    low = tl.load(seeds_ptr + 2 * row).to(tl.uint64)
    return low | (tl.load(seeds_ptr + 2 * row + 1).to(tl.uint64) << 32)


@triton.jit
def bits_of_range(seed, sample, position, first, SIZE: tl.constexpr):
    """(SIZE,) uint32 of the ids from ``first`` on, a multiple of 4: one counter serves four."""
    a, b, c, d = _words(seed, sample, position, first // 4 + tl.arange(0, SIZE // 4))
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (SIZE,))


@triton.jit
def bits_of(seed, sample, position, ids):
    """uint32 of scattered ids; equals ``bits_of_range`` of them, with four times the work."""
    a, b, c, d = _words(seed, sample, position, ids // 4)
    word = ids % 4
    return tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d))


@triton.jit
def _words(seed, sample, position, counter):
    """Philox 4x32-10. As in ``tl.philox``, but a 64-bit product is one instruction there, where
    its two halves would be two."""
    c0, c1 = counter.to(tl.uint32), (counter * 0 + position).to(tl.uint32)
    c2, c3 = (counter * 0 + sample).to(tl.uint32), (counter * 0).to(tl.uint32)
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        one, two = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (two >> 32).to(tl.uint32) ^ c1 ^ k0, (one >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = two.to(tl.uint32), one.to(tl.uint32)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def gumbel(bits):
    """Standard Gumbel noise, float32: -log(-log1p(-u))."""
    u = tl.minimum(bits.to(tl.float32) * 2.0**-32 + 2.0**-33, 1 - 2.0**-24)
    # log1p by Kahan's formula, to a few roundings; Triton's interpreter has none of its own.
    rest = 1.0 - u
    tiny = rest == 1.0
    exponential = tl.where(tiny, u, -tl.log(rest) * (u / tl.where(tiny, 1.0, 1.0 - rest)))
    return -tl.log(exponential)


@triton.jit
def gumbel_bound(bits):
    """At least ``gumbel`` times log2(e), and at most 0.09 more for small u: -log2(u), from below
    by the chord between powers of two, which is how a float's bits read as an integer."""
    as_integer = bits.to(tl.float32).to(tl.int32, bitcast=True)
    return 127.0 + 32.0 - as_integer.to(tl.float32) * 2.0**-23
