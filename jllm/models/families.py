"""Which model families there are, and how a ``config.json`` becomes a ``ModelConfig``.

A family is an entry of ``FAMILIES``: the flags by which it differs from Llama, and what
transformers (5.24) assumes where its ``config.json`` leaves a key out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jllm.config import ROPE_TYPES, ModelConfig, RopeScaling

__all__ = ["FAMILIES", "Family", "config_from_hf", "positive_int", "token_ids", "yarn_context"]


@dataclass(frozen=True)
class Family:
    """How one architecture differs from the plain Llama block.

    Attributes:
      name: ``ModelConfig.family``, and ``model_type`` in a config.json.
      qkv_bias, o_bias, mlp_bias: always or never, or the config.json key that decides.
      qk_norm: RMSNorm on query and key heads.
      window: what ``sliding_window`` means: ``none`` (nothing), ``all`` (every layer), or
        ``upper`` (layers from ``max_window_layers`` on, if ``use_sliding_window``).
      defaults: the values of absent config.json keys.
    """

    name: str
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    window: Literal["none", "all", "upper"] = "none"
    defaults: Mapping[str, Any] = field(default_factory=dict)


_DEFAULTS = dict(
    hidden_act="silu",
    rms_norm_eps=1e-6,
    rope_theta=10_000.0,
    partial_rotary_factor=1.0,
    tie_word_embeddings=False,
    use_sliding_window=False,
)
_QWEN_DEFAULTS = dict(
    num_key_value_heads=32,
    max_position_embeddings=32_768,
    sliding_window=4096,
    max_window_layers=28,
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        "llama",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        defaults=dict(max_position_embeddings=2048, bos_token_id=1, eos_token_id=2),
    ),
    "MistralForCausalLM": Family(
        "mistral",
        window="all",
        defaults=dict(
            num_key_value_heads=8,
            max_position_embeddings=131_072,
            sliding_window=4096,
            bos_token_id=1,
            eos_token_id=2,
        ),
    ),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, window="upper", defaults=_QWEN_DEFAULTS),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        window="upper",
        defaults=dict(_QWEN_DEFAULTS, head_dim=128),
    ),
}

# What each kind of rope scaling must say, and what it may.
_ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (
        ("factor",),
        ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"),
    ),
}


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a parsed ``config.json``, as transformers 4 or 5 writes it.

    Raises:
      ValueError: an unknown architecture, a key that is missing or malformed, or a feature that
        jllm does not have: another activation, partial rotary, quantized safetensors, ...
    """
    family = _family(config)
    c = {**_DEFAULTS, **family.defaults, **config}
    if c.get("quantization_config"):
        method = c["quantization_config"].get("quant_method", "unknown")
        raise ValueError(
            f"Quantized safetensors are not supported (quantization_config: {method}); "
            "use the model's unquantized safetensors or a GGUF file."
        )
    if c["hidden_act"] != "silu":
        raise ValueError(f"hidden_act must be 'silu', not {c['hidden_act']!r}.")
    hidden, heads = positive_int(c, "hidden_size"), positive_int(c, "num_attention_heads")
    if c.get("head_dim") is None and hidden % heads:
        raise ValueError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, "
            "and the model's config has no head_dim."
        )
    layers = positive_int(c, "num_hidden_layers")
    window, sliding_layers = _windows(family, c, layers)
    rope_theta, rope_scaling, context = _rope(c)

    def flag(rule: bool | str) -> bool:
        return bool(c.get(rule)) if isinstance(rule, str) else rule

    return ModelConfig(
        family=family.name,
        vocab_size=positive_int(c, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=positive_int(c, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=positive_int(c, "num_key_value_heads", heads),
        head_dim=positive_int(c, "head_dim", hidden // heads),
        max_position_embeddings=context,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        rms_norm_eps=float(c["rms_norm_eps"]),
        qkv_bias=flag(family.qkv_bias),
        o_bias=flag(family.o_bias),
        mlp_bias=flag(family.mlp_bias),
        qk_norm=family.qk_norm,
        tie_embeddings=bool(c["tie_word_embeddings"]),
        sliding_window=window,
        sliding_layers=sliding_layers,
        bos_token_id=c.get("bos_token_id"),
        eos_token_ids=token_ids(c.get("eos_token_id")),
    )


def token_ids(*values: int | list[int] | tuple[int, ...] | None) -> tuple[int, ...]:
    """The union, in order, of ids given as one, as several, or not at all."""
    union: dict[int, None] = {}
    for value in values:
        ids = value if isinstance(value, list | tuple) else [value]
        union.update((i, None) for i in ids if i is not None)
    return tuple(union)


def positive_int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """The positive integer under ``key``; absent or null is an error unless there is a default."""
    value = default if config.get(key) is None else config[key]
    if value is None:
        raise ValueError(f"The model's config has no {key}.")
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"The model's config has {key} {value!r}; it must be a positive integer.")
    return value


def yarn_context(context: int, original: int | None, factor: float) -> int:
    """The longest context of a model that states yarn's original context.

    Qwen's instructions for long texts are to add yarn and leave ``max_position_embeddings`` at
    the original 32768, so the stretched length is in neither key alone.
    """
    return context if original is None else max(context, int(original * factor))


def _family(config: Mapping[str, Any]) -> Family:
    name = (config.get("architectures") or [config.get("model_type")])[0]
    known = FAMILIES | {family.name: family for family in FAMILIES.values()}
    if name not in known:
        raise ValueError(f"Unknown architecture {name!r}; known are {', '.join(FAMILIES)}.")
    return known[name]


def _windows(
    family: Family, c: Mapping[str, Any], layers: int
) -> tuple[int | None, tuple[bool, ...]]:
    """``sliding_window`` and ``sliding_layers``; ``layer_types`` has the last word on which."""
    window, kinds = c.get("sliding_window"), c.get("layer_types")
    if family.window == "none" or (family.window == "upper" and not c["use_sliding_window"]):
        window = None
    if kinds is None:
        first = c["max_window_layers"] if family.window == "upper" else 0
        slides = tuple(window is not None and layer >= first for layer in range(layers))
    else:
        if unknown := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
            raise ValueError(
                f"layer_types has {unknown[0]!r}; known are full_attention and sliding_attention."
            )
        if len(kinds) != layers:
            raise ValueError(f"layer_types has {len(kinds)} entries for {layers} layers.")
        slides = tuple(kind == "sliding_attention" for kind in kinds)
    if not any(slides):
        return None, ()
    if window is None:
        raise ValueError("layer_types has sliding_attention, but no sliding_window is in use.")
    return window, () if all(slides) else slides


def _rope(c: Mapping[str, Any]) -> tuple[float, RopeScaling | None, int]:
    """``rope_theta``, ``rope_scaling`` and the longest context, from old keys or new ones."""
    rope = c.get("rope_scaling") or c.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError("rope_parameters that differ between layers are not supported.")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ValueError(f"Unknown rope scaling type {kind!r}; known are {', '.join(ROPE_TYPES)}.")
    partial = rope.get("partial_rotary_factor", c["partial_rotary_factor"])
    if partial not in (1, None):
        raise ValueError(f"partial_rotary_factor must be 1, not {partial!r}.")
    theta = float(rope.get("rope_theta", c["rope_theta"]))
    context = positive_int(c, "max_position_embeddings")
    if kind == "default":
        return theta, None, context

    # As in transformers: the outer key wins, and without any the whole context is original.
    stated = c.get("original_max_position_embeddings")
    stated = rope.get("original_max_position_embeddings") if stated is None else stated
    original = context if stated is None or kind == "linear" else stated
    required, optional = _ROPE_KEYS[kind]
    given = {key: rope[key] for key in (*required, *optional) if rope.get(key) is not None}
    if kind == "yarn":
        given.setdefault("factor", context / original)
        context = yarn_context(context, stated, given["factor"])
    if lacking := [key for key in required if key not in given]:
        raise ValueError(f"Rope scaling of type {kind!r} needs {', '.join(lacking)}.")
    return theta, RopeScaling(kind, original_max_position=original, **given), context
