"""An explanation as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jllm.parallel.inspect.explanation import Explanation, Layout, Step
from jllm.parallel.inspect.holders import parts


def report(e: Explanation) -> str:
    """All there is to say of one layout."""
    return "\n\n".join([_title(e), memory(e), collectives(e), times(e), holders(e)])


def _title(e: Explanation) -> str:
    c = e.config
    return (
        f"{e.tp} x {e.gpu.name}, bfloat16: {c.num_layers} layers of {c.num_heads} query and "
        f"{c.num_kv_heads} key/value heads"
    )


def memory(e: Explanation) -> str:
    """What lies in one device's memory."""
    m = e.memory
    copies = f", each head on {m.copies} devices" if m.copies > 1 else ""
    steps = {"decode": e.decode.temporaries, "prefill": e.prefill.temporaries}
    largest = max(steps, key=steps.__getitem__)
    where = "" if e.compiled_for == "cuda" else f", of the program for a {e.compiled_for.upper()}"
    rows = [
        ("weights", _gb(m.weights), f"{m.weights:,} bytes"),
        (
            "KV cache",
            _gb(m.kv),
            f"{m.num_blocks:,} blocks of {m.block_size} = {m.tokens:,} tokens, "
            f"{m.token / 1e3:.1f} kB a token{copies}",
        ),
        (
            "kept free",
            _gb(m.slack),
            f"for temporaries, at most {_gb(steps[largest])} ({largest}{where}), and tables, "
            f"{_gb(m.tables)}",
        ),
        (
            "used at most",
            _gb(m.usable),
            f"{e.engine_config.gpu_memory_utilization:g} of {_gb(m.total)}, of which JAX takes "
            f"{_gb(m.limit)}",
        ),
    ]
    return "Memory of each device, in GB\n" + _table(rows, "lrl")


def collectives(e: Explanation) -> str:
    """What crosses between devices in a step."""
    layers = (
        "" if e.compiled_layers == e.config.num_layers else f" of {e.compiled_layers} of the layers"
    )
    target = f"{e.tp} {e.gpu.name}" if e.compiled_for == "cuda" else f"{e.tp} CPU devices"
    lines = [f"What crosses between devices, read from the program{layers} compiled for {target}"]
    for name, step in _steps(e):
        rows = [
            (
                str(count),
                f"x {one.kind}",
                one.place,
                one.result,
                _size(one.num_bytes),
                f"each; all, over the link: {_size(count * one.link_bytes(e.tp))}",
            )
            for one, count in step.counted
        ]
        lines += [f"- {name}", _table(rows, "rlllrl") if rows else "  nothing"]
    return "\n".join(lines)


def times(e: Explanation) -> str:
    """How long a step takes at least."""
    rows: list[Sequence[str]] = [("", "products", "attention", e.gpu.link, "total", "")]
    for name, step in _steps(e):
        t = step.time
        done = step.rows if step is e.decode else step.tokens
        unit = "tokens" if step is e.decode else "prompt tokens"
        rows.append(
            (
                name,
                *(f"{_ms(part)} ms" for part in (*t, t.total)),
                f"{done / t.total:,.0f} {unit}/s",
            )
        )
    note = f"{e.gpu.link}: bytes only; starting each of the exchanges takes microseconds more"
    return f"Time of a step at least ({note})\n" + _table(rows, "lrrrrr")


def holders(e: Explanation) -> str:
    """Which device holds which slice of which weight, [first, last + 1)."""
    head = ("", "split by", *(f"device {device}" for device in range(e.tp)))
    rows: list[Sequence[str]] = [head]
    for part in parts(e.config, e.tp):
        whole = all(stop - start == part.size for start, stop in part.held)
        cells = ["all"] * e.tp if whole else [f"{start}:{stop}" for start, stop in part.held]
        note = "-" if whole else part.unit + (", copied" if part.copied else "")
        rows.append((part.name, note, *cells))
    return "Which device holds what\n" + _table(rows, "ll" + "r" * e.tp)


def comparison(layouts: Iterable[Layout]) -> str:
    """Layouts side by side, a column each."""
    layouts = list(layouts)
    found = [layout.explanation for layout in layouts if layout.explanation]
    rows: list[Sequence[str]] = [("tp", *(str(layout.tp) for layout in layouts))]

    def row(name: str, cells: dict[int, str]) -> None:
        rows.append((name, *(cells.get(layout.tp, "-") for layout in layouts)))

    row("weights on each device, GB", {e.tp: _gb(e.memory.weights) for e in found})
    row("KV cache on each device, GB", {e.tp: _gb(e.memory.kv) for e in found})
    row("devices with the same KV head", {e.tp: str(e.memory.copies) for e in found})
    row("KV blocks", {e.tp: f"{e.memory.num_blocks:,}" for e in found})
    row("tokens in them", {e.tp: f"{e.memory.tokens:,}" for e in found})
    row("most temporaries, MB", {e.tp: f"{_most_temporaries(e) / 1e6:,.0f}" for e in found})
    row("exchanges in a decode step", {e.tp: str(len(e.decode.collectives)) for e in found})
    row("their bytes over the link, MB", {e.tp: f"{_linked(e) / 1e6:,.1f}" for e in found})
    row("decode step at least, ms", {e.tp: _ms(e.decode.time.total) for e in found})
    row("  of it over the link", {e.tp: _ms(e.decode.time.link) for e in found})
    row("prefill step at least, ms", {e.tp: _ms(e.prefill.time.total) for e in found})
    row("  of it over the link", {e.tp: _ms(e.prefill.time.link) for e in found})
    row("tokens/s at most", {e.tp: f"{e.decode.rows / e.decode.time.total:,.0f}" for e in found})
    problems = [f"tp={layout.tp}: {layout.problem}" for layout in layouts if layout.problem]
    title = "Layouts side by side"
    if found:
        e = found[-1]
        names = " and ".join(name for name, _ in _steps(e))
        title += f" on {e.gpu.name}: {names}"
    return "\n".join([title, _table(rows, "l" + "r" * len(layouts)), *problems])


def _steps(e: Explanation) -> list[tuple[str, Step]]:
    d, p = e.decode, e.prefill
    prompts = "1 prompt" if p.rows == 1 else f"{p.rows} prompts"
    return [
        (f"decode of {d.rows} rows, context {d.context:,}", d),
        (f"prefill of {prompts} of {p.context:,} tokens", p),
    ]


def _most_temporaries(e: Explanation) -> int:
    return max(e.decode.temporaries, e.prefill.temporaries)


def _linked(e: Explanation) -> float:
    return sum(one.link_bytes(e.tp) for one in e.decode.collectives)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f}"


def _size(num_bytes: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def _table(rows: Sequence[Sequence[str]], align: str) -> str:
    """Columns in line, two spaces in; ``align`` has an l or an r for each."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if side == "l" else cell.rjust(width)
            for cell, width, side in zip(row, widths, align, strict=True)
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines)
