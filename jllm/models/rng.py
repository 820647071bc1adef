"""Counter-based random numbers for sampling: Philox 4x32-10 (Salmon et al., SC 2011).

A draw is a function of (seed, sample index, position, token id) and of nothing else, so a
request's tokens do not depend on its neighbours, its row, its bucket, or on how often it was
preempted. The same generator exists in Triton (``tl.philox``), bit for bit.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array

_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def _mul_hi_lo(a: int, b: Array) -> tuple[Array, Array]:
    """High and low words of the 64-bit product of two uint32, by halves: JAX has no uint64
    unless the whole process runs in 64-bit mode."""
    a_low, a_high = jnp.uint32(a & 0xFFFF), jnp.uint32(a >> 16)
    b_low, b_high = b & 0xFFFF, b >> 16
    low_high, high_low = a_low * b_high, a_high * b_low
    carry = (a_low * b_low >> 16) + (low_high & 0xFFFF) + (high_low & 0xFFFF)
    high = a_high * b_high + (low_high >> 16) + (high_low >> 16) + (carry >> 16)
    return high, jnp.uint32(a) * b


def philox(key: tuple[Array, Array], counter: tuple[Array, Array, Array, Array]) -> list[Array]:
    """Four uint32 words per counter; all arguments uint32, broadcast against each other."""
    words = jnp.broadcast_arrays(*counter)

    def round(_: int, state: tuple[Array, ...]) -> tuple[Array, ...]:
        c0, c1, c2, c3, k0, k1 = state
        high0, low0 = _mul_hi_lo(_MULTIPLIER[0], c0)
        high1, low1 = _mul_hi_lo(_MULTIPLIER[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        return c0, c1, c2, c3, k0 + jnp.uint32(_WEYL[0]), k1 + jnp.uint32(_WEYL[1])

    # A loop, not ten unrolled rounds: XLA fuses those into each of the four outputs and computes
    # them four times over (16 x 49152 draws on 2 CPU cores: 60 ms unrolled, 3.4 ms as a loop).
    return list(lax.fori_loop(0, 10, round, (*words, *key))[:4])


def gumbel(seeds: Array, samples: Array, positions: Array, token_ids: Array) -> Array:
    """Standard Gumbel noise (B, C), float32, for the token ids (B, C) of each row.

    Args:
      seeds: (B, 2) uint32, low and high word of the request's 64-bit seed.
      samples: (B,) which of the request's n samples a row is.
      positions: (B,) position of the token being drawn.
      token_ids: (B, C) ids in the vocabulary.
    """
    ids = token_ids.astype(jnp.uint32)
    words = philox(
        (seeds[:, :1], seeds[:, 1:]),
        (
            ids // 4,
            positions.astype(jnp.uint32)[:, None],
            samples.astype(jnp.uint32)[:, None],
            jnp.zeros((1, 1), jnp.uint32),
        ),
    )
    return _gumbel_of_bits(lax.select_n((ids % 4).astype(jnp.int32), *words))


def gumbel_rows(
    seeds: Array, samples: Array, positions: Array, count: int, first: Array | int = 0
) -> Array:
    """Gumbel noise (B, count) of the ids from ``first`` on, a multiple of 4; equals ``gumbel`` of
    them, with a quarter of the work since one counter serves four ids."""
    words = philox(
        (seeds[:, :1], seeds[:, 1:]),
        (
            (jnp.arange((count + 3) // 4, dtype=jnp.uint32) + jnp.uint32(first // 4))[None, :],
            positions.astype(jnp.uint32)[:, None],
            samples.astype(jnp.uint32)[:, None],
            jnp.zeros((1, 1), jnp.uint32),
        ),
    )
    bits = jnp.stack(words, axis=-1).reshape(len(seeds), -1)
    return _gumbel_of_bits(bits[:, :count])


def _gumbel_of_bits(bits: Array) -> Array:
    """``-log(-log1p(-u))`` of u in (0, 1): the large noise, which decides, comes from small u,
    where float32 still resolves 2**-33. With -log(-log(u)) it would end at 2**-24, and no token
    of probability below 6e-8 could ever be drawn."""
    u = bits.astype(jnp.float32) * jnp.float32(2**-32) + jnp.float32(2**-33)
    u = jnp.minimum(u, jnp.float32(1 - 2**-24))  # u = 1 would give -inf
    return -jnp.log(-jnp.log1p(-u))
