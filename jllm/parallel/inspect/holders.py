"""Which device holds which slice of which weight."""

from __future__ import annotations

from typing import NamedTuple

from jllm.config import ModelConfig
from jllm.parallel.sharding import share

# Part of an array -> the axis that it is split along, as ``share`` knows it, and that axis's unit.
_PARTS = {
    "embed": ("V", "token ids"),
    "wqkv, queries": ("KGD", "query heads"),
    "wqkv, keys and values": ("KD", "key/value heads"),
    "KV cache": ("KD", "key/value heads"),
    "wo": ("KGD", "query heads"),
    "w_gate_up": ("F", "MLP columns"),
    "w_down": ("F", "MLP columns"),
    "lm_head": ("V", "token ids"),
    "norms": ("E", "hidden sizes"),
}


class Part(NamedTuple):
    """An array, or part of one, over devices.

    Attributes:
      name: of the array.
      unit: what it is split by.
      size: how many units it has.
      held: of each device, the first unit and the one after the last.
    """

    name: str
    unit: str
    size: int
    held: tuple[tuple[int, int], ...]

    @property
    def copied(self) -> bool:
        """Whether some units are on several devices."""
        return sum(stop - start for start, stop in self.held) > self.size


def parts(config: ModelConfig, tp: int) -> list[Part]:
    """What each of ``tp`` devices holds of a model, and of its cache.

    Raises ValueError if the model cannot be split over so many.
    """
    c = config
    sizes = {
        "V": c.vocab_size,
        "KGD": c.num_heads,
        "KD": c.num_kv_heads,
        "F": c.intermediate_size,
        "E": c.hidden_size,
    }
    found = []
    for name, (axis, unit) in _PARTS.items():
        if name == "lm_head" and c.tie_embeddings:
            continue
        width = c.head_dim if axis.endswith("D") else 1  # of a unit, in entries of the axis
        slices = [share(axis, c, tp, device) for device in range(tp)]
        held = tuple((one.start // width, one.stop // width) for one in slices)
        found.append(Part(name, unit, sizes[axis], held))
    return found
