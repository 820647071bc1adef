"""The Triton code of the sampler; how it is launched, and over what, says sampling.py."""

from __future__ import annotations

import triton
import triton.language as tl

from jllm.kernels.filter_kernels import LEAST, draw_kept, find_candidates
from jllm.kernels.noise import LOG2_E, bits_of, bits_of_range, gumbel, gumbel_bound, philox_key

PLAIN = tl.constexpr(1)  # kinds of a row; 0 is greedy
FILTERED = tl.constexpr(2)
# Of gumbel_bound and what it is compared with: log2 rounds to 1e-5, the logits to 1e-7 of them.
SLACK = tl.constexpr(1e-3)


@triton.jit
def scan_kernel(
    # inputs
    logits_ptr,  # (B, V)
    raw_ptr,  # (B, V)
    kind_ptr,  # (B,) int32
    divisor_ptr,  # (B,) float32: the temperature; 1 for greedy rows
    seeds_ptr,  # (B, 2) uint32
    samples_ptr,  # (B,) int32
    positions_ptr,  # (B,) int32
    # outputs, one per tile
    best_ptr,  # (B, N) float32: the largest logit; of a plain row the largest with noise
    best_id_ptr,  # (B, N) int32: its id
    lse_ptr,  # (B, N) float32: logsumexp of tempered logits
    raw_lse_ptr,  # (B, N) float32: logsumexp of raw
    peaks_ptr,  # (B, P) float32: the largest logit of each STRIPE ids
    # sizes
    VOCAB: tl.constexpr,  # V
    TILES: tl.constexpr,  # N
    PEAKS: tl.constexpr,  # P
    # what
    RANDOM: tl.constexpr,  # whether rows may be plain
    FILTERS: tl.constexpr,  # whether rows may be filtered
    LSE: tl.constexpr,
    RAW_LSE: tl.constexpr,
    # how
    TILE: tl.constexpr,
    STRIPE: tl.constexpr,
):
    """One tile of one row: all that the draw needs to know of it, in one read."""
    tile, row = tl.program_id(0), tl.program_id(1)
    first = tile * TILE
    at = tl.arange(0, TILE)
    inside = first + at < VOCAB
    row_ptr = logits_ptr + row.to(tl.int64) * VOCAB + first
    divisor = tl.load(divisor_ptr + row)
    x = tl.load(row_ptr + at, mask=inside, other=float("-inf")).to(tl.float32) / divisor
    kind = tl.load(kind_ptr + row)
    if RANDOM and kind == PLAIN:
        seed = philox_key(seeds_ptr, row)
        sample, position = tl.load(samples_ptr + row), tl.load(positions_ptr + row)
        best, place = _noisy_best(x, row_ptr, divisor, seed, sample, position, first, VOCAB, TILE)
    else:
        best, place = argmax(x, TILE)
    out = row * TILES + tile
    tl.store(best_ptr + out, best)
    tl.store(best_id_ptr + out, first + place)
    if LSE:
        tl.store(lse_ptr + out, _logsumexp(x))
    if RAW_LSE:
        raw_at = raw_ptr + row.to(tl.int64) * VOCAB + first + at
        raw = tl.load(raw_at, mask=inside, other=float("-inf")).to(tl.float32)
        tl.store(raw_lse_ptr + out, _logsumexp(raw))
    if FILTERS and kind == FILTERED:
        stripe = tile * (TILE // STRIPE) + tl.arange(0, TILE // STRIPE)
        peaks = tl.max(tl.reshape(x, (TILE // STRIPE, STRIPE)), axis=1)
        tl.store(peaks_ptr + row * PEAKS + stripe, peaks, mask=stripe < PEAKS)


@triton.jit
def _noisy_best(
    x, row_ptr, divisor, seed, sample, position, first, VOCAB: tl.constexpr, TILE: tl.constexpr
):
    """The largest of x + noise, and its place.

    Two logarithms of every token would take longer than reading it. A bound without any says
    which token most likely wins; only if others might too is all of the tile computed.
    """
    bound = x * LOG2_E + gumbel_bound(bits_of_range(seed, sample, position, first, TILE))
    _, place = argmax(bound, TILE)
    best = tl.load(row_ptr + place, mask=first + place < VOCAB, other=float("-inf"))
    best = best.to(tl.float32) / divisor + gumbel(bits_of(seed, sample, position, first + place))
    reach = best * LOG2_E - SLACK * (1 + 1e-3 * tl.abs(best))
    if tl.sum((bound > reach).to(tl.int32), axis=0) > 1:
        PART: tl.constexpr = TILE // 4  # a part at a time: all would not fit into registers
        best = float("-inf")
        for start in range(0, TILE, PART):
            at = start + tl.arange(0, PART)
            part = tl.load(row_ptr + at, mask=first + at < VOCAB, other=float("-inf"))
            noise = gumbel(bits_of_range(seed, sample, position, first + start, PART))
            value, index = argmax(part.to(tl.float32) / divisor + noise, PART)
            place = tl.where(value > best, start + index, place)
            best = tl.maximum(value, best)
    return best, place


@triton.jit
def argmax(x, SIZE: tl.constexpr):
    """The largest of x (SIZE,), and the place of the first that is; cheaper than ``tl.max`` of
    values and places together, which compares both at every step."""
    best = tl.max(x, axis=0)
    place = tl.min(tl.where(x == best, tl.arange(0, SIZE), SIZE), axis=0)
    return best, place


@triton.jit
def _logsumexp(x):
    best = tl.max(x, axis=0)
    shift = tl.where(best == float("-inf"), 0.0, best)
    total = tl.sum(tl.exp(x - shift), axis=0)
    return tl.where(total > 0, shift + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))


@triton.jit
def draw_kernel(
    # inputs
    logits_ptr,  # (B, V)
    raw_ptr,  # (B, V)
    kind_ptr,  # (B,) int32
    divisor_ptr,  # (B,) float32
    top_k_ptr,  # (B,) int32; 0 is off
    top_p_ptr,  # (B,) float32; 1 is off
    log_min_p_ptr,  # (B,) float32; -inf is off
    seeds_ptr,  # (B, 2) uint32
    samples_ptr,  # (B,) int32
    positions_ptr,  # (B,) int32
    processed_ptr,  # (B,) int32
    best_ptr,  # (B, N) float32, from here on as scan_kernel gives them
    best_id_ptr,  # (B, N) int32
    lse_ptr,  # (B, N) float32
    raw_lse_ptr,  # (B, N) float32
    peaks_ptr,  # (B, P) float32
    # outputs
    token_ptr,  # (B,) int32
    logprob_ptr,  # (B,) float32
    cut_ptr,  # (B,) float32
    last_ptr,  # (B,) int32
    stripes_ptr,  # (B, P) int32: scratch, as are these
    values_ptr,  # (B, C) float32: candidates
    ids_ptr,  # (B, C) int32
    # sizes
    VOCAB: tl.constexpr,  # V
    TILES: tl.constexpr,  # N
    PEAKS: tl.constexpr,  # P
    CANDIDATES: tl.constexpr,  # C
    # what
    FILTERS: tl.constexpr,
    LSE: tl.constexpr,
    RAW_LSE: tl.constexpr,
    LOGPROBS: tl.constexpr,
    PROCESSED: tl.constexpr,
    BOUNDARY: tl.constexpr,
    # how
    TILES_PADDED: tl.constexpr,
    PEAKS_PADDED: tl.constexpr,
    STRIPE: tl.constexpr,
    GATHER: tl.constexpr,  # ids of an iteration that looks for candidates
    TILE: tl.constexpr,  # of an iteration over candidates
    WIDE: tl.constexpr,  # of an iteration over the whole row
    FEW_PEAKS: tl.constexpr,  # peaks that top-p alone tries first
    MOST_PEAKS: tl.constexpr,  # and then
):
    """The token of one row and its logprob, from what the tiles say."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * VOCAB
    raw_row_ptr = raw_ptr + row.to(tl.int64) * VOCAB
    tile = tl.arange(0, TILES_PADDED)
    inside = tile < TILES
    at = row * TILES + tile
    tiles_best = tl.load(best_ptr + at, mask=inside, other=float("-inf"))
    best, winner = argmax(tiles_best, TILES_PADDED)
    token = tl.load(best_id_ptr + row * TILES + winner)
    divisor = tl.load(divisor_ptr + row)
    kept = 0.0  # logsumexp of what the token is drawn from
    if LSE:
        kept = _logsumexp(tl.load(lse_ptr + at, mask=inside, other=float("-inf")))
    if FILTERS:
        cut, last = float("-inf"), VOCAB
        # A row of nothing but -inf is as if greedy.
        if (tl.load(kind_ptr + row) == FILTERED).to(tl.int32) * (best >= LEAST).to(tl.int32) > 0:
            total = kept
            top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
            log_min_p = tl.load(log_min_p_ptr + row)
            floor = tl.maximum(best + log_min_p - BOUNDARY, LEAST)
            partial = (top_k > 0).to(tl.int32) + (log_min_p > float("-inf")).to(tl.int32)
            seed = philox_key(seeds_ptr, row)
            sample, position = tl.load(samples_ptr + row), tl.load(positions_ptr + row)
            values_row_ptr = values_ptr + row * CANDIDATES
            ids_row_ptr = ids_ptr + row * CANDIDATES
            count, start = find_candidates(
                row_ptr, divisor, floor, best, total, top_k, top_p, partial,
                peaks_ptr + row * PEAKS, stripes_ptr + row * PEAKS, values_row_ptr, ids_row_ptr,
                VOCAB, PEAKS, CANDIDATES, BOUNDARY, PEAKS_PADDED, STRIPE, GATHER,
                FEW_PEAKS, MOST_PEAKS,
            )  # fmt: skip
            if count > 0:
                token, cut, last, kept = draw_kept(
                    values_row_ptr, ids_row_ptr, count, 1.0, start, best, total, top_k, top_p,
                    partial, BOUNDARY, seed, sample, position, True, TILE,
                )  # fmt: skip
            else:
                token, cut, last, kept = draw_kept(
                    row_ptr, ids_row_ptr, VOCAB, divisor, floor, best, total, top_k, top_p,
                    partial, BOUNDARY, seed, sample, position, False, WIDE,
                )  # fmt: skip
        tl.store(cut_ptr + row, cut)
        tl.store(last_ptr + row, last)
    token = tl.minimum(token, VOCAB - 1)  # whatever NaN does, it is a token
    tl.store(token_ptr + row, token)
    if LOGPROBS:
        logprob = 0.0
        if RAW_LSE:
            raw_total = _logsumexp(tl.load(raw_lse_ptr + at, mask=inside, other=float("-inf")))
            logprob = tl.load(raw_row_ptr + token).to(tl.float32) - raw_total
        if PROCESSED:
            drawn = tl.load(row_ptr + token).to(tl.float32) / divisor - kept
            logprob = tl.where(tl.load(processed_ptr + row) > 0, drawn, logprob)
        tl.store(logprob_ptr + row, logprob)
