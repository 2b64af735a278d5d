"""Quantise a trainer's weights as the engine's checkpoint is quantised.

Each form is a pure function of one weight. Scales are divided by tensors, so that they are the same
on every device: CUDA multiplies by the reciprocal if it divides by a Python number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

import torch

BLOCK: Final = 128  # rows and columns that share a scale in `fp8_block`
_FP8_MAX: Final = 448.0
_INT8_SPAN: Final = 127.5  # half of -128 ... 127
_CHUNK: Final = 1 << 22  # elements quantised at once, so that intermediate results stay small


class QuantizedForm(NamedTuple):
    """How a checkpoint stores quantised weights.

    Attributes:
        dtype: Of the quantised weight.
        scale_suffix: What the name of the scale appends to that of the weight.
        scale_dtypes: Those that its scale might have.
        quantize: Given a matrix [rows, columns] and the dtype of its scale, return the quantised
            matrix and the scale.
    """

    dtype: torch.dtype
    scale_suffix: str
    scale_dtypes: tuple[torch.dtype, ...]
    quantize: Callable[[torch.Tensor, torch.dtype], tuple[torch.Tensor, torch.Tensor]]


def _fp8_block(weight: torch.Tensor, _: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise as vLLM's ``per_block_cast_to_fp8`` does; scale float32 [row, column blocks]."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    largest = blocks.abs().amax((1, 3), keepdim=True).float().clamp(min=1e-4)
    scale = largest / largest.new_full((), _FP8_MAX)
    quantized = (blocks * (1 / scale)).to(torch.float8_e4m3fn).view(padded.shape)
    return quantized[:rows, :columns].contiguous(), scale[:, 0, :, 0]


def _channel_scale(weight: torch.Tensor, largest: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the scale [rows, 1] that takes a row's largest magnitude to `largest`."""
    scale = weight.abs().amax(1, keepdim=True)
    scale /= scale.new_full((), largest)
    scale = torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale).to(dtype)
    return torch.where(scale == 0, torch.finfo(dtype).smallest_normal, scale)  # rounded to zero


def _scaled(weight: torch.Tensor, scale: torch.Tensor, least: float, most: float) -> torch.Tensor:
    # compressed-tensors adds a zero point of 0, which turns -0.0 into 0.0.
    return (weight / scale).add_(0).clamp_(least, most)


def _fp8_channel(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise as compressed-tensors does with 8-bit floats and the strategy ``channel``."""
    scale = _channel_scale(weight, _FP8_MAX, dtype)
    return _scaled(weight, scale, -_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn), scale


def _int8_channel(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise as compressed-tensors does with symmetric 8-bit ints and the strategy ``channel``.

    Values are rounded half to even.
    """
    scale = _channel_scale(weight, _INT8_SPAN, dtype)
    return _scaled(weight, scale, -128, 127).round_().to(torch.int8), scale


_FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32)

FORMS: Final[Mapping[str, QuantizedForm]] = {
    "fp8_block": QuantizedForm(torch.float8_e4m3fn, "_scale_inv", (torch.float32,), _fp8_block),
    "fp8_channel": QuantizedForm(torch.float8_e4m3fn, "_scale", _FLOATS, _fp8_channel),
    "int8_channel": QuantizedForm(torch.int8, "_scale", _FLOATS, _int8_channel),
}


@torch.no_grad()
def quantize_weight(
    weight: torch.Tensor, form: str, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Return the tensors that a checkpoint stores for a weight, by the suffix of their names.

    ``""`` has the quantised weight, of the weight's shape; ``"_scale_inv"`` (``fp8_block``) or
    ``"_scale"`` its scale, by which the quantised weight is multiplied to get the weight. A row of
    zeros gets the ``eps`` of the dtype that it is computed in, a block of zeros 1e-4 / 448.

    Args:
        weight: bfloat16, float16 or float32 [..., rows, columns]; every matrix of stacked ones,
            as of experts, is quantised alone. Rows are output channels.
        form: One of `FORMS`. ``fp8_block`` has float32 scales [..., ceil(rows / 128),
            ceil(columns / 128)], the others have scales [..., rows, 1] of the weight's dtype.
        dtype: The dtype to convert the weight to first.

    Raises:
        ValueError: The weight is no matrix, or has NaN or infinite elements.
    """
    if weight.ndim < 2:
        raise ValueError(f"{form} quantises matrices, not shape {tuple(weight.shape)}")
    if weight.ndim > 2:
        pairs = [quantize_weight(matrix, form, dtype) for matrix in weight]
        return {suffix: torch.stack([pair[suffix] for pair in pairs]) for suffix in pairs[0]}
    rows = max(1, _CHUNK // (BLOCK * max(1, weight.shape[1]))) * BLOCK
    dtype = dtype or weight.dtype
    wide, quantize = torch.promote_types(weight.dtype, dtype), FORMS[form].quantize
    chunks = (chunk.to(wide) for chunk in torch.split(weight, rows))
    found = zip(*(quantize(chunk, dtype) for chunk in chunks), strict=True)
    quantized, scale = (torch.cat(parts) for parts in found)
    if not bool(scale.isfinite().all()):
        raise ValueError("NaN and infinity cannot be quantised")
    return {"": quantized, FORMS[form].scale_suffix: scale}


class Quantizer:
    """Quantise those of a trainer's tensors that a checkpoint has quantised.

    Example:
        >>> import torch
        >>> from delta_sender import Quantizer
        >>> dtypes = {
        ...     "q_proj.weight": torch.float8_e4m3fn,
        ...     "q_proj.weight_scale_inv": torch.float32,
        ...     "norm.weight": torch.bfloat16,
        ... }
        >>> model = {"q_proj.weight": torch.ones(256, 300), "norm.weight": torch.ones(300)}
        >>> for name, tensor in Quantizer("fp8_block", dtypes)(model.items()):
        ...     print(name, tensor.dtype, tuple(tensor.shape))
        q_proj.weight torch.float8_e4m3fn (256, 300)
        q_proj.weight_scale_inv torch.float32 (2, 3)
        norm.weight torch.float32 (300,)

    Args:
        form: One of `FORMS`.
        dtypes: Those of the quantised checkpoint's tensors, by name.

    Attributes:
        scale_of: By the name of each quantised weight that of its scale.

    Raises:
        ValueError: The form is unknown, or the checkpoint has no tensor in it.
    """

    def __init__(self, form: str, dtypes: Mapping[str, torch.dtype]) -> None:
        if form not in FORMS:
            raise ValueError(f"quantize {form!r} is not one of {', '.join(FORMS)}")
        self._form = form
        self._stored, suffix, scale_dtypes, _ = FORMS[form]
        self._scale_dtypes = {  # by the weight's name
            name: dtypes[name + suffix]
            for name, dtype in dtypes.items()
            if dtype == self._stored and dtypes.get(name + suffix) in scale_dtypes
        }
        if not self._scale_dtypes:
            raise ValueError(f"the base has no weight in the form {form}, with NAME{suffix}")
        self.scale_of = {name: name + suffix for name in self._scale_dtypes}

    def __call__(
        self, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield quantised weights, each followed by its scale; other tensors as they are.

        A weight is quantised in the precision in which it is given, its scale rounded to the dtype
        that it has in the checkpoint. A tensor that is quantised already is yielded as it is.

        Raises:
            ValueError: See `quantize_weight`.
        """
        for name, tensor in tensors:
            if name not in self._scale_dtypes or tensor.dtype == self._stored:
                yield name, tensor
                continue
            try:
                pair = quantize_weight(tensor, self._form, self._scale_dtypes[name])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            for suffix, stored in pair.items():
                yield name + suffix, stored
