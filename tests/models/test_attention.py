"""Paged attention against a plain softmax over each row's own context."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jllm.models.attention import (
    CONTEXT_TILE,
    QUERY_TILE,
    Chunks,
    Rows,
    attend,
    cut_rows,
    locate_tokens,
    prefill_tiles,
    write_kv,
)

HEADS, GROUP, DIM, BLOCK = 2, 3, 16, 8


def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None) -> np.ndarray:
    """q (Q, K, G, D): the last Q positions of a context k, v (C, K, D)."""
    positions = np.arange(len(k) - len(q), len(k))[:, None]
    at = np.arange(len(k))[None, :]
    seen = at <= positions
    if window is not None:
        seen &= at > positions - window
    scores = np.einsum("qkgd,ckd->kgqc", q, k) * DIM**-0.5
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("kgqc,ckd->qkgd", weights, v)


@pytest.mark.parametrize("window", [None, 5, 70], ids=["full", "window 5", "window 70"])
@pytest.mark.parametrize(
    ("decode", "prefill"),
    [
        ([1, 7, 8, 9, CONTEXT_TILE, CONTEXT_TILE + 1, 200], []),
        ([], [(5, 5), (1, 33), (QUERY_TILE, QUERY_TILE), (QUERY_TILE + 1, 150)]),
        ([3, 130], [(2 * QUERY_TILE + 3, 140), (1, 1), (7, 90)]),
    ],
    ids=["decode", "prefill", "mixed"],
)
def test_mixed_batches_equal_plain_attention(
    decode: list[int], prefill: list[tuple[int, int]], window: int | None
) -> None:
    """``decode`` are context lengths; ``prefill`` (query length, context length), so that chunks
    that start at 0 and in mid-context, shorter and longer than a tile, all occur; a padding row
    and, behind chunks, padding tokens are added."""
    rng = np.random.default_rng(0)
    contexts = [*decode, *(context for _, context in prefill)]
    width = max(-(-c // BLOCK) for c in contexts) + 1
    order = rng.permutation(np.arange(1, 1 + len(contexts) * width)).reshape(len(contexts), width)
    kv = rng.normal(size=(1 + order.size, 2, HEADS, BLOCK, DIM)).astype(np.float32)
    kv[:] = np.nan  # what nobody wrote for this row must not matter, whatever it is
    ks = [rng.normal(size=(c, HEADS, DIM)).astype(np.float32) for c in contexts]
    vs = [rng.normal(size=(c, HEADS, DIM)).astype(np.float32) for c in contexts]
    for table, k, v in zip(order, ks, vs, strict=True):
        for i in range(len(k)):
            kv[table[i // BLOCK], 0, :, i % BLOCK] = k[i]
            kv[table[i // BLOCK], 1, :, i % BLOCK] = v[i]

    queries = [1] * len(decode) + [q for q, _ in prefill]
    parts = [rng.normal(size=(n, HEADS, GROUP, DIM)).astype(np.float32) for n in queries]
    # A step of decode rows has a token for each row, padding too.
    padding = np.zeros((3 if prefill else 1, HEADS, GROUP, DIM), np.float32)
    starts = np.cumsum([0, *queries, 0])
    chunks = Chunks(jnp.asarray(starts, jnp.int32), jnp.asarray([len(decode)], jnp.int32))
    rows = Rows(
        jnp.asarray([*order, 0 * order[0]], jnp.int32),
        jnp.asarray([*contexts, 0], jnp.int32),
        chunks if prefill else None,
    )
    q = np.concatenate([*parts, padding])
    # The new keys and values come with the projection: the cache does not have them yet.
    where = locate_tokens(rows, len(q), BLOCK)
    block, offset = np.divmod(np.asarray(where.slot), BLOCK)
    new = kv[block, :, :, offset]  # (T, 2, K, D)
    kv[block, :, :, offset] = np.nan
    qkv = np.concatenate([q, np.moveaxis(new, 1, 2)], axis=2)  # (T, K, G + 2, D)
    no_turn = jnp.ones((len(q), DIM // 2)), jnp.zeros((len(q), DIM // 2))
    cuts = cut_rows(q.shape, jnp.float32, rows, window)
    out, _ = attend(
        jnp.asarray(qkv)[None],
        None,
        no_turn,
        where.slot,
        jnp.asarray(kv),
        rows.block_tables,
        cuts,
        window=window,
        scale=DIM**-0.5,
        eps=1e-6,
    )
    out = np.asarray(out)
    assert np.isfinite(out).all()
    for at, part, k, v in zip(starts, parts, ks, vs, strict=False):
        expected = reference(part, k, v, window)
        np.testing.assert_allclose(out[at : at + len(part)], expected, atol=2e-5)


def test_tokens_are_located_from_row_lengths_alone() -> None:
    rows = Rows(
        block_tables=jnp.asarray([[5, 6], [7, 8], [9, 3], [0, 0]], jnp.int32),
        context_lens=jnp.asarray([10, 12, 3, 0], jnp.int32),
        chunks=Chunks(jnp.asarray([0, 1, 5, 8, 8], jnp.int32), jnp.asarray([1], jnp.int32)),
    )
    where = locate_tokens(rows, num_tokens=10, block_size=BLOCK)
    #                              decode  last 4 of 12   3 of 3  padding
    assert where.position.tolist() == [9, 8, 9, 10, 11, 0, 1, 2, 0, 0]
    assert where.slot.tolist() == [49, 64, 65, 66, 67, 72, 73, 74, 0, 0]
    assert where.row.tolist()[:8] == [0, 1, 1, 1, 1, 2, 2, 2]


def test_prefill_rows_are_cut_into_tiles_and_padding_tiles_are_empty() -> None:
    starts, lens = jnp.asarray([0, 4, 6, 6]), jnp.asarray([9, 2, 0])
    tiles = prefill_tiles(starts, lens, num_tokens=8, size=3)
    assert tiles.length.tolist() == [3, 1, 2, 0, 0]
    assert tiles.token.tolist()[:3] == [0, 3, 4]
    assert tiles.row.tolist()[:3] == [0, 0, 1]
    assert tiles.position.tolist() == [5, 8, 0, 0, 0]


def test_writes_touch_their_own_slots_only() -> None:
    rng = np.random.default_rng(0)
    kv = rng.normal(size=(4, 2, HEADS, BLOCK, DIM)).astype(np.float32)
    k, v = rng.normal(size=(2, 3, HEADS, DIM)).astype(np.float32)
    slots = [BLOCK, 2 * BLOCK + 3, 3 * BLOCK + 7]
    written = np.asarray(
        write_kv(jnp.asarray(kv), jnp.asarray(k), jnp.asarray(v), jnp.asarray(slots))
    )
    expected = kv.copy()
    for i, slot in enumerate(slots):
        expected[slot // BLOCK, 0, :, slot % BLOCK] = k[i]
        expected[slot // BLOCK, 1, :, slot % BLOCK] = v[i]
    np.testing.assert_array_equal(written, expected)
