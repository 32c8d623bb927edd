"""How each model type names the dimensions and positions of its SSM layers in its Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from replayssm.checks import ReplayError, fail
from replayssm.config import GDNSpec, KDASpec, LayerSpec, Mamba2Spec

# "hybrid" is attention beside or before Mamba-2.
_SSM_LAYER_TYPES = frozenset({"linear_attention", "mamba", "mamba2", "hybrid"})


class MissingError(Exception):
    """A field is neither given nor derivable from the given ones; the model's defaults are needed."""


class Fields:
    """Named access to a raw mapping or to a transformers configuration object."""

    def __init__(self, source: object) -> None:
        self._source = source

    def has(self, name: str) -> bool:
        return name in self._source if isinstance(self._source, Mapping) else hasattr(self._source, name)

    def raw(self, name: str) -> Any:
        """The value of a field, None if it is absent."""
        return self._source.get(name) if isinstance(self._source, Mapping) else getattr(self._source, name, None)

    def get(self, *names: str) -> Any:
        """The first of `names` that has a value."""
        for name in names:
            if (value := self.raw(name)) is not None:
                return value
        raise MissingError(names[0])

    def integer(self, *names: str) -> int:
        value = self.get(*names)
        if isinstance(value, bool) or not isinstance(value, int):
            raise fail(names[0], value, "an integer")
        return value


def _ssm_layers(fields: Fields, derive: Callable[[Fields], Iterable[int]] | None = None) -> list[int]:
    """Indices of the SSM layers: from an explicit list of types, else from the model's own rule."""
    types = fields.raw("layer_types") or fields.raw("layers_block_type")
    if types is not None:
        return [i for i, kind in enumerate(types) if kind in _SSM_LAYER_TYPES]
    if derive is None:
        raise MissingError("layer_types")
    return list(derive(fields))


def _all_layers(fields: Fields) -> Iterable[int]:
    return range(fields.integer("num_hidden_layers"))


def _all_but_every(interval_name: str) -> Callable[[Fields], Iterable[int]]:
    """All layers except the last of every group of `interval_name`."""

    def derive(fields: Fields) -> Iterable[int]:
        interval = fields.integer(interval_name)
        return [i for i in _all_layers(fields) if (i + 1) % interval]

    return derive


def _head_dim(fields: Fields, inner: int, heads: int) -> int:
    given = fields.raw("mamba_d_head")
    head_dim = inner // heads if given in (None, "auto") else fields.integer("mamba_d_head")
    if head_dim * heads != inner:
        raise ReplayError(
            f"mamba_d_head is {given!r}; allowed: the inner size {inner} divided by mamba_n_heads ({heads})"
        )
    return head_dim


def _nemotron_h(fields: Fields) -> Iterable[LayerSpec]:
    def derive(fields: Fields) -> Iterable[int]:
        return [i for i, kind in enumerate(fields.get("hybrid_override_pattern")) if kind == "M"]

    for i in _ssm_layers(fields, derive):
        yield Mamba2Spec(
            num_heads=fields.integer("mamba_num_heads"),
            head_dim=fields.integer("mamba_head_dim"),
            d_state=fields.integer("ssm_state_size"),
            n_groups=fields.integer("n_groups", "mamba_n_groups"),
            conv_kernel=fields.integer("conv_kernel", "mamba_d_conv"),
            layer_idx=i,
        )


def _mamba2(fields: Fields) -> Iterable[LayerSpec]:
    for i in _ssm_layers(fields, _all_layers):
        yield Mamba2Spec(
            num_heads=fields.integer("num_heads"),
            head_dim=fields.integer("head_dim"),
            d_state=fields.integer("state_size"),
            n_groups=fields.integer("n_groups"),
            conv_kernel=fields.integer("conv_kernel"),
            layer_idx=i,
        )


def _mamba_prefixed(fields: Fields, inner: int, layers: Iterable[int]) -> Iterable[LayerSpec]:
    """Bamba, Granite and Falcon-H1 share their names; they differ in what the heads divide."""
    heads = fields.integer("mamba_n_heads")
    for i in layers:
        yield Mamba2Spec(
            num_heads=heads,
            head_dim=_head_dim(fields, inner, heads),
            d_state=fields.integer("mamba_d_state"),
            n_groups=fields.integer("mamba_n_groups"),
            conv_kernel=fields.integer("mamba_d_conv"),
            layer_idx=i,
        )


def _expanded(fields: Fields) -> int:
    return int(fields.get("mamba_expand") * fields.integer("hidden_size"))


def _bamba(fields: Fields) -> Iterable[LayerSpec]:
    def derive(fields: Fields) -> Iterable[int]:
        attention = fields.get("attn_layer_indices")
        return [i for i in _all_layers(fields) if i not in attention]

    return _mamba_prefixed(fields, _expanded(fields), _ssm_layers(fields, derive))


def _granitemoehybrid(fields: Fields) -> Iterable[LayerSpec]:
    return _mamba_prefixed(fields, _expanded(fields), _ssm_layers(fields))


def _falcon_h1(fields: Fields) -> Iterable[LayerSpec]:
    if not fields.has("mamba_d_ssm"):
        raise MissingError("mamba_d_ssm")
    inner = fields.raw("mamba_d_ssm") or _expanded(fields)
    return _mamba_prefixed(fields, inner, _ssm_layers(fields, _all_layers))


def _zamba2(fields: Fields) -> Iterable[LayerSpec]:
    heads = fields.integer("n_mamba_heads")
    for i in _ssm_layers(fields):
        yield Mamba2Spec(
            num_heads=heads,
            head_dim=_expanded(fields) // heads,
            d_state=fields.integer("mamba_d_state"),
            n_groups=fields.integer("mamba_ngroups"),
            conv_kernel=fields.integer("mamba_d_conv"),
            layer_idx=i,
        )


def _gdn(fields: Fields) -> Iterable[LayerSpec]:
    for i in _ssm_layers(fields, _all_but_every("full_attention_interval")):
        yield GDNSpec(
            num_k_heads=fields.integer("linear_num_key_heads"),
            num_v_heads=fields.integer("linear_num_value_heads"),
            head_k_dim=fields.integer("linear_key_head_dim"),
            head_v_dim=fields.integer("linear_value_head_dim"),
            conv_kernel=fields.integer("linear_conv_kernel_dim"),
            layer_idx=i,
        )


def _kda(heads: int, dim: int, conv: int, lower_bound: float | None, layers: Iterable[int]) -> Iterable[LayerSpec]:
    for i in layers:
        yield KDASpec(heads, heads, dim, dim, conv_kernel=conv, layer_idx=i, lower_bound=lower_bound)


def _linear_attn(fields: Fields, name: str, nested_name: str) -> int:
    """A KDA dimension: checkpoints keep it in `linear_attn_config`, transformers in a flat field."""
    nested = fields.raw("linear_attn_config")
    return Fields(nested).integer(nested_name) if nested and nested_name in nested else fields.integer(name)


def _kda_dims(fields: Fields) -> tuple[int, int, int]:
    return (
        _linear_attn(fields, "linear_num_heads", "num_heads"),
        _linear_attn(fields, "linear_head_dim", "head_dim"),
        _linear_attn(fields, "linear_conv_kernel_dim", "short_conv_kernel_size"),
    )


def _kimi_linear(fields: Fields) -> Iterable[LayerSpec]:
    def derive(fields: Fields) -> Iterable[int]:
        return sorted(i - 1 for i in fields.get("linear_attn_config").get("kda_layers") or ())  # counted from 1 there

    return _kda(*_kda_dims(fields), None, _ssm_layers(fields, derive))


def _glm5_next(fields: Fields) -> Iterable[LayerSpec]:
    nested = fields.raw("linear_attn_config") or {}
    if not fields.has("linear_lower_bound") and "gate_lower_bound" not in nested:
        raise MissingError("linear_lower_bound")
    lower_bound = nested.get("gate_lower_bound", fields.raw("linear_lower_bound"))
    if lower_bound is None and nested and nested.get("safe_gate", True):
        lower_bound = -5.0
    return _kda(*_kda_dims(fields), lower_bound, _ssm_layers(fields))


def _bailing_hybrid(fields: Fields) -> Iterable[LayerSpec]:
    heads = fields.integer("linear_num_heads", "num_attention_heads")
    dim = fields.integer("linear_head_dim", "head_dim")
    conv = fields.integer("linear_conv_kernel_dim", "short_conv_kernel_size")
    lower_bound = fields.get("kda_lower_bound") if fields.get("kda_safe_gate") else None
    return _kda(heads, dim, conv, lower_bound, _ssm_layers(fields, _all_but_every("layer_group_size")))


READERS: dict[str, Callable[[Fields], Iterable[LayerSpec]]] = {
    "nemotron_h": _nemotron_h,
    "mamba2": _mamba2,
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "granitemoehybrid": _granitemoehybrid,
    "zamba2": _zamba2,
    "qwen3_5": _gdn,
    "qwen3_5_moe": _gdn,
    "qwen3_next": _gdn,
    "olmo_hybrid": _gdn,
    "kimi_linear": _kimi_linear,
    "glm5_next": _glm5_next,
    "bailing_hybrid": _bailing_hybrid,
}
