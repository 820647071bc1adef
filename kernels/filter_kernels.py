"""Triton code that draws through min-p, top-k and top-p without sorting.

What the filters keep of a row is its likeliest tokens, down to some value, and of those that have
just this value the first few. So the filters are two numbers, ``cut`` and ``ties``, and a token x
is kept if ``x > cut``, or ``x == cut`` and fewer than ``ties`` lower ids have that value too:

    x      5 3 4 3 1 3     top-k 4: cut = 3, ties = 2
    kept   * * * *

They are found by bisection over the floats, which have an order-preserving map to integers, with a
sum over the row at each step; all of it on a short list of candidates if that is enough.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jllm.kernels.noise import bits_of, bits_of_range, gumbel

LEAST = tl.constexpr(-3.4028234663852886e38)  # the least that can be drawn at all
MANY = tl.constexpr(1 << 30)


@triton.jit
def key_of(x):
    """float32 -> int32, in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def of_key(key):
    """The inverse of ``key_of``."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def find_cut(
    values_ptr,  # (size,)
    size,
    divisor,  # of the values
    low,  # the least answer
    high,  # the largest, and the largest value
    limit,
    total,  # logsumexp of the row, if weighted
    WEIGHTED: tl.constexpr,
    TILE: tl.constexpr,
):
    """The least x in [low, high] above which the values sum up to less than ``limit``, and that
    sum. Each counts 1, or, weighted, its probability."""
    first, last = key_of(low), key_of(high)
    found = 0.0
    while first < last:
        middle = (first & last) + ((first ^ last) >> 1)  # a sum of both could overflow
        pivot = of_key(middle)
        each = tl.zeros((TILE,), tl.float32)
        for start in range(0, size, TILE):
            at = start + tl.arange(0, TILE)
            x = tl.load(values_ptr + at, mask=at < size, other=float("-inf")) / divisor
            if WEIGHTED:
                each += tl.where(x > pivot, tl.exp(x - total), 0.0)
            else:
                each += tl.where(x > pivot, 1.0, 0.0)
        above = tl.sum(each, axis=0)
        if above < limit:
            last = middle
            found = above
        else:
            first = middle + 1
    return of_key(last), found


@triton.jit
def find_candidates(
    # inputs
    row_ptr,  # (V,)
    divisor,  # of the logits
    floor,  # what min-p leaves is at least this
    best,  # the largest tempered logit
    total,  # logsumexp of the row
    top_k,
    top_p,
    partial,  # 1 if min-p or top-k cut
    peaks_ptr,  # (P,): the largest tempered logit of each STRIPE ids
    # outputs
    stripes_ptr,  # (P,) int32: scratch
    values_ptr,  # (C,): tempered logits of the candidates, in the order of ids
    ids_ptr,  # (C,) int32
    # sizes
    VOCAB: tl.constexpr,  # V
    PEAKS: tl.constexpr,  # P
    CANDIDATES: tl.constexpr,  # C
    BOUNDARY: tl.constexpr,
    PEAKS_PADDED: tl.constexpr,
    STRIPE: tl.constexpr,
    GATHER: tl.constexpr,
    FEW_PEAKS: tl.constexpr,
    MOST_PEAKS: tl.constexpr,
):
    """Lists the likeliest tokens, down to some value, all that the filters keep among them; and
    gives how many these are, 0 if there are too many, and the value."""
    # At least k tokens are as large as the k-th of the stripes' peaks. Min-p says itself from what
    # value on it keeps. Top-p alone tries the likeliest few, then most of what there is room for.
    wanted = tl.where(top_k > 0, top_k, tl.where(partial > 0, MANY, FEW_PEAKS))
    enough = tl.where(partial > 0, -1.0, top_p * (1 - BOUNDARY))
    stripe = tl.arange(0, PEAKS_PADDED)
    peaks = tl.load(peaks_ptr + stripe, mask=stripe < PEAKS, other=float("inf"))
    least = tl.maximum(floor, tl.min(peaks, axis=0))
    start, count, searching = floor, 0, 1
    while searching > 0:
        start = floor
        if wanted <= PEAKS:
            start, _ = find_cut(
                peaks_ptr, PEAKS, 1.0, least, best, wanted.to(tl.float32), 0.0, False, PEAKS_PADDED
            )
        count, mass = _list_candidates(
            row_ptr, divisor, peaks_ptr, start, total, stripes_ptr, values_ptr, ids_ptr,
            VOCAB, PEAKS, CANDIDATES, PEAKS_PADDED, STRIPE, GATHER,
        )  # fmt: skip
        count = tl.where(mass >= enough, count, CANDIDATES + 1)
        searching = (count > CANDIDATES).to(tl.int32) * (wanted < MOST_PEAKS).to(tl.int32)
        searching *= (partial == 0).to(tl.int32)
        wanted = MOST_PEAKS
    return tl.where(count <= CANDIDATES, count, 0), start


@triton.jit
def _list_candidates(
    row_ptr, divisor, peaks_ptr, start, total, stripes_ptr, values_ptr, ids_ptr,
    VOCAB: tl.constexpr, PEAKS: tl.constexpr, CANDIDATES: tl.constexpr,
    PEAKS_PADDED: tl.constexpr, STRIPE: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """Lists the tokens from ``start`` up, in the order of ids, reading only the stripes whose peak
    is that high. Returns how many there are, more than fit included, and their probability."""
    stripe = tl.arange(0, PEAKS_PADDED)
    peaks = tl.load(peaks_ptr + stripe, mask=stripe < PEAKS, other=float("-inf"))
    high = (peaks >= start).to(tl.int32)
    tl.store(stripes_ptr + tl.cumsum(high, axis=0) - 1, stripe, mask=high > 0)
    num_stripes = tl.sum(high, axis=0)
    tl.debug_barrier()  # what one thread stores others load

    count, done = 0, 0
    mass = tl.zeros((GATHER,), tl.float32)
    while done < num_stripes:
        which = done + tl.arange(0, GATHER // STRIPE)
        stripes = tl.load(stripes_ptr + which, mask=which < num_stripes, other=PEAKS)
        ids = stripes[:, None] * STRIPE + tl.arange(0, STRIPE)[None, :]
        ids = tl.reshape(ids, (GATHER,))
        x = tl.load(row_ptr + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32) / divisor
        listed = (x >= start).to(tl.int32)
        place = count + tl.cumsum(listed, axis=0) - 1
        fits = listed * (place < CANDIDATES).to(tl.int32) > 0
        tl.store(values_ptr + place, x, mask=fits)
        tl.store(ids_ptr + place, ids, mask=fits)
        mass += tl.where(listed > 0, tl.exp(x - total), 0.0)
        count += tl.sum(listed, axis=0)
        # More than fit are of no use.
        done = tl.where(count <= CANDIDATES, done + GATHER // STRIPE, num_stripes)
    tl.debug_barrier()
    return count, tl.sum(mass, axis=0)


@triton.jit
def draw_kept(
    values_ptr,  # (size,): in the order of ids
    ids_ptr,  # (size,) int32 if LISTED; else the ids are 0, 1, 2, ...
    size,
    divisor,  # of the values
    floor,  # the least cut: what min-p leaves, or what is listed, is at least this
    best,  # the largest value
    total,  # logsumexp of the row
    top_k,
    top_p,
    partial,  # 1 if top-p is of a part of the mass: if min-p or top-k cut
    boundary,
    seed,
    sample,
    position,
    LISTED: tl.constexpr,
    TILE: tl.constexpr,
):
    """The token drawn, the cut, the last id that is kept of those at the cut, and the logsumexp of
    all that is kept."""
    cut, ties = floor, MANY
    if top_k > 0:
        limit = top_k.to(tl.float32)
        cut, above = find_cut(values_ptr, size, divisor, floor, best, limit, total, False, TILE)
        ties = top_k - above.to(tl.int32)
    if top_p < 1:
        mass = 1.0
        if partial > 0:
            mass = _mass(values_ptr, size, divisor, cut, ties, total, TILE)
        enough = top_p * mass * (1 - boundary)
        finer, before = find_cut(values_ptr, size, divisor, cut, best, enough, total, True, TILE)
        # Kept are ties as long as what came before is not enough.
        fit = tl.minimum(tl.ceil((enough - before) / tl.exp(finer - total)), 1e9).to(tl.int32)
        ties = tl.maximum(tl.where(finer > cut, fit, tl.minimum(fit, ties)), 1)
        cut = finer

    winner = tl.full((TILE,), float("-inf"), tl.float32)
    winner_id, last = tl.zeros((TILE,), tl.int32), tl.full((TILE,), -1, tl.int32)
    weight, seen = tl.zeros((TILE,), tl.float32), 0
    for start in range(0, size, TILE):
        at = start + tl.arange(0, TILE)
        x = tl.load(values_ptr + at, mask=at < size, other=float("-inf")) / divisor
        if LISTED:
            ids = tl.load(ids_ptr + at, mask=at < size, other=0)
            bits = bits_of(seed, sample, position, ids)
        else:
            ids = at
            bits = bits_of_range(seed, sample, position, start, TILE)
        level = (x == cut).to(tl.int32)
        tie = level * (seen + tl.cumsum(level, axis=0) <= ties).to(tl.int32)
        seen += tl.sum(level, axis=0)
        keep = (x > cut).to(tl.int32) + tie > 0
        noisy = tl.where(keep, x + gumbel(bits), float("-inf"))
        winner_id = tl.where(noisy > winner, ids, winner_id)
        winner = tl.maximum(noisy, winner)
        weight += tl.where(keep, tl.exp(x - total), 0.0)
        last = tl.where(tie > 0, ids, last)
    best = tl.max(winner, axis=0)
    token = tl.min(tl.where(winner == best, winner_id, MANY), axis=0)
    return token, cut, tl.max(last, axis=0), total + tl.log(tl.sum(weight, axis=0))


@triton.jit
def _mass(values_ptr, size, divisor, cut, ties, total, TILE: tl.constexpr):
    """The probability of all above the cut, and of as many as ``ties`` at it."""
    above, level = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.int32)
    for start in range(0, size, TILE):
        at = start + tl.arange(0, TILE)
        x = tl.load(values_ptr + at, mask=at < size, other=float("-inf")) / divisor
        above += tl.where(x > cut, tl.exp(x - total), 0.0)
        level += (x == cut).to(tl.int32)
    fitting = tl.minimum(tl.sum(level, axis=0), ties).to(tl.float32)
    return tl.sum(above, axis=0) + fitting * tl.exp(cut - total)
