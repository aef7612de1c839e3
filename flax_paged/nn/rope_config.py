"""What a config says about rotary position embedding, in either of the two spellings of config.json."""

import dataclasses
from collections.abc import Mapping
from typing import Any

# Which fields each type needs, and which it may have; theta and partial_rotary_factor go with all.
_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("original_max_position_embeddings",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
_OPTIONAL = {
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("factor", "attention_factor"),
}
ROPE_TYPES = tuple(_REQUIRED)
_ORIGINAL = "original_max_position_embeddings"


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: its type, base and scaling.

    Args:
        theta: Base of the wavelengths.
        rope_type: One of `ROPE_TYPES`. The fields below belong to some types only, and are None elsewhere.
        partial_rotary_factor: Share of head_dim that is rotated, from its start.
        factor: Stretch of the context (linear, dynamic, yarn, llama3, longrope).
        original_max_position_embeddings: Context length before the stretch (yarn, llama3, longrope).
        low_freq_factor: llama3: wavelengths above original / low are divided by `factor`.
        high_freq_factor: llama3: wavelengths below original / high are kept.
        attention_factor: yarn, longrope: factor on cos and sin; None derives it.
        beta_fast: yarn: rotations above which a frequency is kept; None means 32.
        beta_slow: yarn: rotations below which it is divided by `factor`; None means 1.
        mscale: yarn: with mscale_all_dim, derives the attention factor.
        mscale_all_dim: See mscale.
        truncate: yarn: whether the range between the betas is rounded outwards; None means True.
        short_factor: longrope: divisor of each frequency, for sequences up to the original context length.
        long_factor: longrope: the same for longer sequences.

    Raises:
        ValueError: Unknown type, a field missing or one that the type has no use for, or a value out of range.
    """

    theta: float = 10000.0
    rope_type: str = "default"
    partial_rotary_factor: float = 1.0
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    def __post_init__(self):
        check_rope_type(self.rope_type)
        for name in ("short_factor", "long_factor"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(float(x) for x in getattr(self, name)))
        required, optional = _REQUIRED[self.rope_type], _OPTIONAL.get(self.rope_type, ())
        for field in dataclasses.fields(self)[3:]:
            value = getattr(self, field.name)
            if value is None and field.name in required:
                raise ValueError(f"rope type {self.rope_type!r} needs {field.name}.")
            if value is not None and field.name not in (*required, *optional):
                raise ValueError(f"{field.name}={value!r} has no meaning for rope type {self.rope_type!r}; remove it.")
        self._check_ranges()

    def _check_ranges(self):
        positive = ("theta", "partial_rotary_factor", "factor", _ORIGINAL, "low_freq_factor", "high_freq_factor")
        for name in (*positive, "attention_factor", "beta_fast", "beta_slow"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"rope {name}={value!r}: expected a positive number.")
        if self.partial_rotary_factor > 1:
            raise ValueError(f"partial_rotary_factor={self.partial_rotary_factor}: expected at most 1.")
        if self.rope_type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} must be below high_freq_factor={self.high_freq_factor}."
            )
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if factors is not None and not all(x > 0 for x in factors):
                raise ValueError(f"rope {name} must hold positive numbers, got {factors}.")

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many of the head's dimensions are rotated.

        Raises:
            ValueError: That number is odd or zero, or does not suit the type.
        """
        rotary_dim = int(head_dim * self.partial_rotary_factor)
        if rotary_dim < 2 or rotary_dim % 2:
            raise ValueError(
                f"{head_dim=} with partial_rotary_factor={self.partial_rotary_factor} gives {rotary_dim} rotated"
                " dimensions; rotary embedding turns them in pairs, so expected an even number of at least 2."
            )
        if self.rope_type == "dynamic" and rotary_dim == 2:
            raise ValueError("rope type 'dynamic' needs at least 4 rotated dimensions, got 2.")
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if factors is not None and len(factors) != rotary_dim // 2:
                raise ValueError(f"rope {name} has {len(factors)} numbers; expected {rotary_dim // 2}, one a pair.")
        return rotary_dim

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], *, default_theta: float = 10000.0) -> "RopeConfig":
        """Read it from a config.json, written by transformers 4 or 5.

        Transformers 4 wrote `rope_theta` and `rope_scaling` (with `rope_type`, earlier `type`), transformers 5 writes
        `rope_parameters`.

        Args:
            values: The parsed config.json.
            default_theta: Base where the file names none.

        Raises:
            ValueError: Both spellings are there and disagree, the type is unknown, or a key is unknown, missing or
                without meaning for the type.
        """
        new, old = values.get("rope_parameters"), values.get("rope_scaling")
        if not new:
            return _parse(values, old or {}, "rope_scaling", default_theta)
        parsed = _parse(values, new, "rope_parameters", default_theta)
        theta = values.get("rope_theta")
        if theta is not None and float(theta) != parsed.theta:
            raise ValueError(
                f"config.json says rope_theta={theta} and rope_parameters.rope_theta={parsed.theta}; remove one."
            )
        if old:
            other = _parse({**values, "rope_theta": parsed.theta}, old, "rope_scaling", default_theta)
            if other != parsed:
                raise ValueError(f"config.json says rope_parameters={new} and rope_scaling={old}; remove one.")
        return parsed

    def to_hf(self) -> dict[str, Any]:
        """Return the keys of config.json in both spellings, so that either version of transformers reads them right."""
        scaling = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)[3:]}
        scaling = {name: list(x) if isinstance(x, tuple) else x for name, x in scaling.items() if x is not None}
        scaling = {"rope_type": self.rope_type, **scaling}
        parameters = {"rope_theta": self.theta, **scaling}
        values: dict[str, Any] = {"rope_theta": self.theta}
        if self.partial_rotary_factor != 1:
            values["partial_rotary_factor"] = parameters["partial_rotary_factor"] = self.partial_rotary_factor
        values["rope_scaling"] = scaling if self.rope_type != "default" else None
        return {**values, "rope_parameters": parameters}


def check_rope_type(rope_type: Any) -> None:
    """Raise a ValueError that lists the known rope types, unless this is one."""
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"rope type {rope_type!r} is not known; expected one of {list(ROPE_TYPES)}.")


def _parse(values: Mapping[str, Any], scaling: Mapping[str, Any], where: str, default_theta: float) -> RopeConfig:
    """Read one spelling; `values` gives what stands beside it at the top level."""
    scaling = {name: value for name, value in scaling.items() if value is not None}
    types = [scaling.pop(name) for name in ("rope_type", "type") if name in scaling]
    if len(types) == 2 and types[0] != types[1]:
        raise ValueError(f"{where} says rope_type={types[0]!r} and type={types[1]!r}; remove one.")
    rope_type = types[0] if types else "default"
    check_rope_type(rope_type)
    if not types and set(scaling) - {"rope_theta", "partial_rotary_factor"}:
        raise ValueError(f"{where}={scaling} has no rope_type; expected one of {list(ROPE_TYPES)}.")
    theta = float(scaling.pop("rope_theta", None) or values.get("rope_theta") or default_theta)
    partial = float(scaling.pop("partial_rotary_factor", None) or values.get("partial_rotary_factor") or 1.0)

    known = {field.name for field in dataclasses.fields(RopeConfig)[3:]}
    unknown = sorted(set(scaling) - known)
    if unknown:
        raise ValueError(f"{where} holds {', '.join(unknown)}, which rope type {rope_type!r} has no use for.")
    if _ORIGINAL in _REQUIRED[rope_type]:
        # The order of transformers: the top level, then the scaling, then the model's own context length.
        original = values.get(_ORIGINAL) or scaling.get(_ORIGINAL) or values.get("max_position_embeddings")
        if original is not None:
            scaling[_ORIGINAL] = int(original)
    elif scaling.get(_ORIGINAL) == values.get("max_position_embeddings"):
        scaling.pop(_ORIGINAL, None)
    scaling = {name: float(x) if type(x) is int and name != _ORIGINAL else x for name, x in scaling.items()}
    return RopeConfig(theta=theta, rope_type=rope_type, partial_rotary_factor=partial, **scaling)
