"""Rows that share the start of their contexts are found, and read as the others are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import jllm
from jllm.engine import planner
from jllm.engine.batch import SHARED_FIELDS
from jllm.engine.shared_prefix import SharedGroup, fill_tiles, neighbours, shared_groups
from tests.tiny_model import tiny_model


def tables_of(*starts: tuple[int, int], width: int = 40) -> np.ndarray:
    """A table for each (id, blocks): that many blocks of the prefix of that id, then its own."""
    own = 10_000 + np.arange(len(starts) * width, dtype=np.int32).reshape(len(starts), width)
    for row, (prefix, blocks) in enumerate(starts):
        own[row, :blocks] = prefix * 100 + np.arange(blocks)
    return own


def test_neighbours_brings_rows_of_one_prefix_together_in_their_order() -> None:
    order = neighbours(tables_of((2, 9), (1, 9), (2, 9), (3, 9), (1, 9))[:, 0])
    assert order is not None
    assert order.tolist() == [1, 4, 0, 2, 3]
    assert neighbours(tables_of((1, 9), (2, 9))[:, 0]) is None


def test_groups_are_as_long_as_their_rows_agree() -> None:
    tables = tables_of(*[(1, 20)] * 5, (2, 12), *[(3, 30)] * 4, *[(3, 9)] * 4)
    full = np.full(len(tables), 35, np.int32)
    assert shared_groups(tables, full) == [
        SharedGroup(0, 5, 20),
        SharedGroup(6, 4, 30),  # the last four share far less with them
        SharedGroup(10, 4, 9),
    ]


@pytest.mark.parametrize(
    ("tables", "full"),
    [
        pytest.param(tables_of(*[(1, 7)] * 8), 30, id="a short prefix"),
        pytest.param(tables_of(*[(1, 20)] * 3), 30, id="few rows"),
        pytest.param(tables_of(*[(1, 20)] * 8), 5, id="blocks that are still written"),
        pytest.param(tables_of(*[(1, 9)] * 4, *[(n, 0) for n in range(60)]), 39, id="few of many"),
    ],
)
def test_what_is_not_worth_it_is_no_group(tables: np.ndarray, full: int) -> None:
    assert shared_groups(tables, np.full(len(tables), full, np.int32)) == []


def test_tiles_hold_a_group_each() -> None:
    views = {name: np.zeros(8, np.int32) for name in SHARED_FIELDS}
    fill_tiles(views, [SharedGroup(0, 5, 9), SharedGroup(6, 2, 3)], size=4, block_size=16)
    assert views["shared_tile"].tolist() == [0, 0, 0, 0, 1, -1, 2, 2]
    assert views["shared_row"].tolist()[:3] == [0, 4, 6]
    assert views["shared_length"].tolist() == [4, 1, 2, 0, 0, 0, 0, 0]
    assert views["shared_context"].tolist()[:3] == [144, 144, 48]


def test_requests_of_one_prompt_give_the_tokens_that_they_give_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests of two prompts, and others between them, in steps that look for what is shared."""
    filled: list[list[SharedGroup]] = []

    def note(views: Any, groups: list[SharedGroup], *sizes: int) -> None:
        filled.append(groups)
        fill_tiles(views, groups, *sizes)

    monkeypatch.setattr(planner, "fill_tiles", note)
    params = tiny_model()
    rng = np.random.default_rng(0)
    long = [rng.integers(3, params.config.vocab_size, 150).tolist() for _ in range(2)]
    prompts = [[*long[n % 2], 5 + n] if n % 3 else [3 + n] * 20 for n in range(40)]
    sampling = jllm.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    found = []
    for shared in (True, False):
        config = jllm.EngineConfig(
            max_num_seqs=64,
            decode_buckets=(64,),
            shared_attention=shared,
            max_model_len=256,
        )
        tokens: dict[str, list[int]] = {}
        with jllm.Engine(params, config) as engine:
            for index, prompt in enumerate(prompts):
                engine.add_request(prompt, sampling, request_id=str(index), stream=False)
            while engine.has_unfinished():
                for output in engine.step():
                    tokens[output.request_id] = output.outputs[0].token_ids
            engine.check_integrity()
        found.append(tokens)
        if shared:
            groups, filled = filled[-1], []
            assert len(groups) == 2
            assert all(group.num_blocks == 9 and group.num_rows >= 4 for group in groups)
    assert not filled
    assert found[0] == found[1]
