"""What crosses between devices, read from the text of a compiled program."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

# An asynchronous collective is two instructions, of which the second (-done) has the result.
_INSTRUCTION = re.compile(
    r" = (?P<result>\S.*?) (?P<kind>all-reduce|all-gather|all-to-all|reduce-scatter|"
    r"collective-permute|collective-broadcast|ragged-all-to-all)(?:-done)?\((?P<rest>.*)"
)
_ARRAY = re.compile(r"(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_PLACE = re.compile(r'op_name="[^"]*?/(?:layer(\d+)/jit\(block\)/)?(embed|attention|mlp|head)/')


class Collective(NamedTuple):
    """One exchange between all devices of a mesh.

    Attributes:
      kind: ``all-reduce``, ``all-gather``, ...
      result: its type, such as ``bf16[64,8192]``.
      num_bytes: of the result on each device.
      place: ``embed``, ``attention``, ``mlp``, ``head``, or the program's name.
      layer: where it is in one.
    """

    kind: str
    result: str
    num_bytes: int
    place: str
    layer: int | None = None

    def link_bytes(self, tp: int) -> float:
        """Bytes that each of ``tp`` devices must send, and receive, at least: of a sum as much as
        of scattering parts of it and gathering them."""
        others = (tp - 1) / tp
        if self.kind == "all-reduce":
            return 2 * others * self.num_bytes
        if self.kind == "reduce-scatter":
            return others * self.num_bytes * tp
        if self.kind in ("all-gather", "all-to-all", "ragged-all-to-all"):
            return others * self.num_bytes
        return self.num_bytes


def collectives(program: str, name: str = "program") -> list[Collective]:
    """Every collective of a program, given as the text of its optimised HLO.

    Args:
      name: the place of those that the model's code gives none.
    """
    found = []
    for match in _INSTRUCTION.finditer(program):
        # On a CPU, XLA adds up 16-bit floats in 32 bits, and marks that so.
        promoted = re.search(r"to_apply=%\S*promoted", match["rest"]) is not None
        arrays = _ARRAY.findall(match["result"])
        num_bytes = sum(_itemsize(bits) * _elements(sizes) for _, bits, sizes in arrays)
        place = _PLACE.search(match["rest"])
        shown = ", ".join(f"{'bf16' if promoted else kind}[{sizes}]" for kind, _, sizes in arrays)
        found.append(
            Collective(
                match["kind"],
                shown,
                num_bytes // 2 if promoted else num_bytes,
                place[2] if place else name,
                int(place[1]) if place and place[1] else None,
            )
        )
    return found


def of_all_layers(found: list[Collective], compiled: int, num_layers: int) -> list[Collective]:
    """Those of a model of ``num_layers``, from those of its first ``compiled`` layers: each of the
    others is like the second."""
    if compiled == num_layers:
        return found
    second = [one for one in found if one.layer == 1]
    rest = [one._replace(layer=layer) for layer in range(compiled, num_layers) for one in second]
    return found + rest


def _itemsize(bits: str) -> int:
    return max(1, int(bits or 8) // 8)


def _elements(sizes: str) -> int:
    return math.prod(int(size) for size in sizes.split(",") if size)
