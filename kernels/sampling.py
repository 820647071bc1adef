"""The sampler in two kernels: one reads every logit once, the other draws from what it found.

``scan_kernel`` runs over (tiles of the vocabulary) x (rows) and reduces each tile to its largest
logit, for plain rows with Gumbel noise on it, and its logsumexp. For rows with filters it also
writes the *peaks*, the largest logit of every 128 ids. ``draw_kernel``, a program per row, merges
these. A filtered row takes the k-th largest peak: no fewer than k tokens reach it, and usually
hardly more, all in stripes of 128 whose peak does. These candidates, in reach of one program, are
what the filters work on (filter_kernels.py); only where they do not hold all that the filters
keep is the whole row read again, some 30 times.

Bytes that must move: the logits once, 4 V a row in float32; raw logits, if they are another array,
for logprobs; for filtered rows 512 a candidate.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton

from jllm.kernels import sampling_kernels
from jllm.kernels.triton_call import triton_call

Array = jax.Array

GREEDY = 0
PLAIN = sampling_kernels.PLAIN.value
FILTERED = sampling_kernels.FILTERED.value

STRIPE = 128
# A filtered row has room for so many: twice those down to peak 900 of 1,000 in random order.
CANDIDATES = 4096


class Launch(NamedTuple):
    """How the sampler is launched.

    Attributes:
      tile: ids of a program of the scan.
      scan_warps: of such a program.
      draw_warps: of a program of the draw, where rows may be filtered.
      gather: ids of an iteration that looks for candidates.
      candidates: of an iteration over those.
      wide: ids of an iteration over a whole row.
      few_peaks: top-p without top-k or min-p first tries the tokens down to this peak.
    """

    tile: int = 4096
    scan_warps: int = 4
    draw_warps: int = 8
    gather: int = 1024
    candidates: int = 1024
    wide: int = 2048
    few_peaks: int = 64


class Options(NamedTuple):
    """Of each of the B rows."""

    kind: Array  # (B,) int32: GREEDY, PLAIN or FILTERED
    divisor: Array  # (B,) float32: the temperature; 1 for greedy rows
    top_k: Array  # (B,) int32; 0 is off
    top_p: Array  # (B,) float32; 1 is off
    log_min_p: Array  # (B,) float32; -inf is off
    seeds: Array  # (B, 2) uint32
    samples: Array  # (B,) int32
    positions: Array  # (B,) int32
    processed: Array  # (B,) int32: 1 for logprobs of the distribution that is drawn from


class Drawn(NamedTuple):
    """What is drawn. Of a row with filters is kept what, over its divisor, is above ``cut``, or is
    ``cut`` and of an id up to ``last``."""

    tokens: Array  # (B,) int32
    logprobs: Array | None  # (B,) float32
    cut: Array | None  # (B,) float32; -inf without filters
    last: Array | None  # (B,) int32


def draw(
    logits: Array,
    raw: Array,
    options: Options,
    *,
    random: bool,
    filtered: bool,
    logprobs: bool,
    processed: bool,
    boundary: float,
    launch: Launch | None = None,
) -> Drawn:
    """Draws one token per row, as ``models.sampler.sample`` says.

    Args:
      logits: (B, V); raw: (B, V), only read for logprobs.
      options: of the rows.
      random, filtered: whether any row may be PLAIN, or FILTERED.
      logprobs: whether to report those of the tokens; processed: whether any row may ask for them
        after temperature and filters.
      boundary: within how much of each other probabilities are equal to min-p and top-p.
      launch: instead of the usual one.
    """
    launch = launch or Launch()
    rows, vocab = logits.shape
    tile = max(STRIPE, min(launch.tile, triton.next_power_of_2(vocab)))
    tiles, peaks = -(-vocab // tile), -(-vocab // STRIPE)
    lse, raw_lse = filtered or (logprobs and processed), logprobs

    def floats(*shape: int, used: bool = True) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape if used else (1,), jnp.float32)

    def ints(*shape: int, used: bool = True) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape if used else (1,), jnp.int32)

    found = triton_call(
        logits,
        raw,
        options.kind,
        options.divisor,
        options.seeds,
        options.samples,
        options.positions,
        kernel=sampling_kernels.scan_kernel,
        out_type=(
            floats(rows, tiles),
            ints(rows, tiles),
            floats(rows, tiles, used=lse),
            floats(rows, tiles, used=raw_lse),
            floats(rows, peaks, used=filtered),
        ),
        grid=(tiles, rows),
        num_warps=launch.scan_warps,
        num_stages=1,
        VOCAB=vocab,
        TILES=tiles,
        PEAKS=peaks,
        RANDOM=random,
        FILTERS=filtered,
        LSE=lse,
        RAW_LSE=raw_lse,
        TILE=tile,
        STRIPE=STRIPE,
    )
    tokens, token_logprobs, cut, last, *_ = triton_call(
        logits,
        raw,
        *(options.kind, options.divisor, options.top_k, options.top_p, options.log_min_p),
        *(options.seeds, options.samples, options.positions, options.processed),
        *found,
        kernel=sampling_kernels.draw_kernel,
        out_type=(
            ints(rows),
            floats(rows, used=logprobs),
            floats(rows, used=filtered),
            ints(rows, used=filtered),
            ints(rows, peaks, used=filtered),
            floats(rows, CANDIDATES, used=filtered),
            ints(rows, CANDIDATES, used=filtered),
        ),
        grid=(rows,),
        num_warps=launch.draw_warps if filtered else 1,
        num_stages=1,
        VOCAB=vocab,
        TILES=tiles,
        PEAKS=peaks,
        CANDIDATES=CANDIDATES,
        FILTERS=filtered,
        LSE=lse,
        RAW_LSE=raw_lse,
        LOGPROBS=logprobs,
        PROCESSED=processed,
        BOUNDARY=boundary,
        TILES_PADDED=triton.next_power_of_2(tiles),
        PEAKS_PADDED=triton.next_power_of_2(peaks),
        STRIPE=STRIPE,
        GATHER=launch.gather,
        TILE=launch.candidates,
        WIDE=launch.wide,
        FEW_PEAKS=launch.few_peaks,
        MOST_PEAKS=peaks * 7 // 8,  # of tokens in random order twice as many reach that one
    )
    return Drawn(
        tokens,
        token_logprobs if logprobs else None,
        cut if filtered else None,
        last if filtered else None,
    )
