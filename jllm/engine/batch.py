"""A step's plan: what the host tells the device, packed into one int32 array.

One array because each transfer has a fixed cost (a small ``device_put`` takes 45 us on the host,
an array passed to a jitted call 3 us). Fields lie one after another; both sides derive the
offsets from the same static spec.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jllm.config import EngineConfig

Int32s = NDArray[np.int32]

# XLA hands a slice of the plan to a Triton kernel without copying it, and jax-triton refuses one
# that does not begin at a multiple of 16 bytes.
ALIGNMENT = 4

# Rows of a group that shares the start of its contexts, at least, and of a tile of such; and of a
# step, for reading that once to be worth a kernel.
LEAST_SHARING, LEAST_SHARED_BUCKET = 4, 64
SHARED_FIELDS = ("shared_row", "shared_length", "shared_context", "shared_tile")

MOST_REPEATED_ROWS = 64  # a step of more rows takes longer than its dispatch, whatever the model


@dataclass(frozen=True)
class StepSpec:
    """The static sizes of a step; each distinct spec is one compiled program.

    Attributes:
      num_rows: B, rows, padding included.
      table_width: P, blocks in a block table.
      num_tokens: T, tokens of a step in which some row has a chunk of its prompt, padding
        included; None for a step of decode rows alone, a token each.
      shared_tiles: tiles of decode rows that share the start of their contexts, padding included;
        0 for a step that does not look for them.
    """

    num_rows: int
    table_width: int
    num_tokens: int | None = None
    shared_tiles: int = 0


class Field(NamedTuple):
    """One field of a packed plan. float32 and uint32 travel as the bits of an int32."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "int32"


def forward_fields(spec: StepSpec) -> tuple[Field, ...]:
    """The plan of the model's forward pass, see ``models.attention.Rows`` and
    ``kernels.tiles.SharedTiles``. ``slots`` are rows of the device's token table; ``tokens`` those
    of chunks, at their places."""
    extra: tuple[Field, ...] = ()
    if spec.shared_tiles:
        sizes = (spec.shared_tiles,) * 3 + (spec.num_rows,)
        extra = tuple(Field(name, (n,)) for name, n in zip(SHARED_FIELDS, sizes, strict=True))
    if spec.num_tokens is not None:
        starts = Field("query_start", (spec.num_rows + 1,))
        extra += (Field("tokens", (spec.num_tokens,)), starts, Field("num_decode", (1,)))
    return (
        *extra,
        Field("context_lens", (spec.num_rows,)),
        Field("slots", (spec.num_rows,)),
        Field("block_tables", (spec.num_rows, spec.table_width)),
    )


def sample_fields(num_rows: int) -> tuple[Field, ...]:
    """The plan of sampling, see ``models.sampler.SamplingRows`` and
    ``models.logit_rules.RuleRows``. Rows that are not sampled (padding, prompts not yet complete)
    have the scratch row as their ``slots``."""
    return (
        Field("slots", (num_rows,)),
        Field("positions", (num_rows,)),
        Field("temperature", (num_rows,), "float32"),
        Field("top_k", (num_rows,)),
        Field("top_p", (num_rows,), "float32"),
        Field("min_p", (num_rows,), "float32"),
        Field("seeds", (num_rows, 2), "uint32"),
        Field("samples", (num_rows,)),
        Field("processed", (num_rows,)),
        Field("num_prompt", (num_rows,)),
        Field("ruled", (num_rows,)),
        Field("min_tokens", (num_rows,)),
        Field("presence_penalty", (num_rows,), "float32"),
        Field("frequency_penalty", (num_rows,), "float32"),
        Field("repetition_penalty", (num_rows,), "float32"),
    )


def offsets(fields: tuple[Field, ...]) -> tuple[list[int], int]:
    """Where each field starts in a plan, and how long the plan is, in int32s."""
    starts, end = [], 0
    for field in fields:
        starts.append(end)
        end += _round_up(math.prod(field.shape), ALIGNMENT)
    return starts, end


def pack(fields: tuple[Field, ...]) -> tuple[Int32s, dict[str, NDArray[Any]]]:
    """An empty plan and, per field, a view into it to be filled in."""
    starts, end = offsets(fields)
    plan = np.zeros(end, np.int32)
    views = {}
    for field, start in zip(fields, starts, strict=True):
        part = plan[start : start + math.prod(field.shape)]
        views[field.name] = part.view(field.dtype).reshape(field.shape)
    return plan, views


@dataclass(frozen=True)
class Buckets:
    """The sizes that steps are padded to, so that few programs serve every batch.

    A step of decode rows alone takes the smallest of ``decode`` that holds them; if its rows share
    much of their contexts, a program of its own, given that ``shares``. One with chunks of prompts
    takes the smallest of ``mixed`` that holds all its tokens, and has as many rows as there can be:
    a row of padding costs next to nothing beside a chunk.
    """

    decode: tuple[int, ...]
    mixed: tuple[int, ...]
    table_width: int
    shares: bool = False

    @classmethod
    def of(cls, config: EngineConfig) -> Buckets:
        """The buckets of a config whose fields are all resolved."""
        assert config.decode_buckets and config.prefill_buckets and config.max_model_len
        most = config.prefill_buckets[-1] + config.decode_buckets[-1]
        return cls(
            decode=config.decode_buckets,
            mixed=(*config.prefill_buckets, most),
            table_width=_round_up(-(-config.max_model_len // config.block_size), ALIGNMENT),
            shares=bool(config.shared_attention),
        )

    @property
    def shared(self) -> tuple[int, ...]:
        """Decode buckets of steps whose rows share much of their contexts."""
        return tuple(n for n in self.decode if n >= LEAST_SHARED_BUCKET) if self.shares else ()

    def decode_spec(self, num_rows: int) -> StepSpec:
        """The spec of a step of so many decode rows."""
        return StepSpec(_fit(self.decode, num_rows), self.table_width)

    def shared_spec(self, num_rows: int) -> StepSpec:
        """The spec of a step of so many decode rows, many of which share; a bucket must fit."""
        # The most tiles: of groups of 5 rows in tiles of 4.
        size = _fit(self.shared, num_rows)
        return StepSpec(size, self.table_width, shared_tiles=size // 2)

    def mixed_spec(self, num_tokens: int) -> StepSpec:
        """The spec of a step with chunks, of so many tokens in all."""
        return StepSpec(self.decode[-1], self.table_width, _fit(self.mixed, num_tokens))

    def repeated_specs(self) -> list[StepSpec]:
        """The specs that may be repeated in one program."""
        limit = _fit((*self.decode, MOST_REPEATED_ROWS), MOST_REPEATED_ROWS)
        return [self.decode_spec(n) for n in self.decode if n <= limit]

    def all_specs(self) -> list[StepSpec]:
        """Every spec that a step can have, largest last."""
        specs = [self.decode_spec(n) for n in self.decode]
        specs += [self.shared_spec(n) for n in self.shared]
        return specs + [self.mixed_spec(n) for n in self.mixed]


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _fit(sizes: tuple[int, ...], count: int) -> int:
    return next(size for size in sizes if size >= count)
