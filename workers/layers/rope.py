"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the layout of Hugging Face checkpoints: dimension i
of a head is rotated together with dimension i + head_dim / 2."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from workers.models.config import Llama3Scaling, ModelConfig, Scaling, YarnScaling


class Rotation:
    """The rotation of T tokens."""

    def __init__(self, table: Tensor, positions: Tensor) -> None:
        self.table = table
        """float32[positions there are, head_dim]: a position's cosines, then its sines."""
        self.positions = positions
        """int64[T]."""

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate heads: [T, heads, head_dim] → the same shape and dtype. Computed in float32."""
        cos, sin = self._factors
        swapped = x.roll(x.shape[-1] // 2, dims=-1)
        return torch.addcmul(x * cos, swapped, sin).to(x.dtype)

    @cached_property
    def _factors(self) -> tuple[Tensor, Tensor]:
        """float32[T, 1, head_dim] each: cosines, twice over; and sines, the first half negated."""
        cos, sin = self.table[self.positions][:, None].chunk(2, dim=-1)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


@dataclass(frozen=True)
class Rope:
    """Angles a position."""

    frequencies: Tensor
    """float32[head_dim / 2], on the CPU: radians a position."""
    magnitude: float
    """What the rotation multiplies lengths by; 1 but for yarn."""
    length: int
    """Positions there are."""
    device: torch.device

    @classmethod
    def build(cls, config: ModelConfig, device: torch.device) -> "Rope":
        """The rotation that a model was trained with, for all positions it takes."""
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        frequencies = _stretch(config.rope_base**exponents, config)
        scaling = config.rope_scaling
        magnitude = scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0
        return cls(frequencies, magnitude, config.max_model_len, device)

    def __call__(self, positions: Tensor) -> Rotation:
        """int64[T] → the rotation of tokens at these positions."""
        return Rotation(self._table, positions)

    @cached_property
    def _table(self) -> Tensor:
        """See `Rotation.table`. From the CPU whatever the device is, so that the bits are the same everywhere."""
        angles = torch.arange(self.length, dtype=torch.float32)[:, None] * self.frequencies
        return (torch.cat((angles.cos(), angles.sin()), dim=-1) * self.magnitude).to(self.device)


def _stretch(periods: Tensor, config: ModelConfig) -> Tensor:
    """float32[head_dim / 2], base^(2i / head_dim) → frequencies with the model's scaling."""
    scaling: Scaling | None = config.rope_scaling
    plain = 1.0 / periods
    if scaling is None:
        return plain
    if isinstance(scaling, YarnScaling):
        return _yarn(periods, config, scaling)
    if isinstance(scaling, Llama3Scaling):
        return _llama3(plain, scaling)
    return plain / scaling.factor


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """By wavelength: short ones kept, long ones stretched, and between them a ramp (Llama 3.1's reference code)."""
    turns = scaling.original_length / (2 * math.pi / plain)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    ramp = ramp.clamp(0, 1)
    return (1 - ramp) * plain / scaling.factor + ramp * plain


def _yarn(periods: Tensor, config: ModelConfig, scaling: YarnScaling) -> Tensor:
    """ "NTK-by-parts": dimensions that turn often within the original context are kept, those that turn rarely are
    stretched, and between them a ramp over the dimension's index."""

    def dimension(turns: float) -> float:
        """The (real) dimension that turns so often within the original context."""
        share = math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(config.rope_base))
        return config.head_dim * share

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(config.head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept
