"""The formats MXFP4 (OCP MX) and NVFP4: 4-bit floats in groups that share a scale."""

import numpy as np

from pdserve.engine.weights.format import (
    BLOCKS,
    BlockFormat,
    Bytes,
    Floats,
    RawTensor,
    gguf_expand,
    gguf_format,
)

CODES, EXPONENTS = "codes", "exponents"


class Mxfp4(BlockFormat):
    """The format MXFP4: 4-bit floats with an exponent per 32 values. Stored as GGUF's blocks, or as
    two parts: CODES uint8 [..., bytes], the first value in the low nibble, and EXPONENTS uint8
    [..., groups of 32]."""

    def unpack(self, raw: RawTensor) -> Floats:
        return super().unpack(self.packable(raw))

    def packable(self, raw: RawTensor) -> RawTensor:
        if BLOCKS in raw.parts:
            return raw
        exponents = raw.parts[EXPONENTS]
        pairs = raw.parts[CODES].reshape(*exponents.shape, 2, 8)  # of 16 values each
        low, high = pairs & 15, pairs >> 4
        blocks = np.empty((*exponents.shape, 17), np.uint8)
        blocks[..., 0] = exponents
        levels = np.stack((low, high), axis=-1).reshape(*exponents.shape, 2, 16)
        blocks[..., 1:] = levels[..., 0, :] | levels[..., 1, :] << np.uint8(4)
        flat = blocks.reshape(*exponents.shape[:-1], -1)
        return RawTensor({BLOCKS: flat}, raw.format, raw.shape, raw.columns)


MXFP4 = Mxfp4("MXFP4", 32, 17, gguf_expand("MXFP4"))
FORMATS = (MXFP4, gguf_format("NVFP4", 64, 36))


def mxfp4(codes: Bytes, exponents: Bytes) -> RawTensor:
    """Return the MXFP4 weight, or stack of weights, with these codes and exponents. Raises
    ValueError if their shapes do not match."""
    expected = (*exponents.shape[:-1], exponents.shape[-1] * 16)
    if codes.shape != expected:
        raise ValueError(
            f"codes {list(codes.shape)} do not match exponents {list(exponents.shape)}: "
            f"expected codes {list(expected)}"
        )
    shape = (*exponents.shape[:-1], exponents.shape[-1] * 32)
    return RawTensor({CODES: codes, EXPONENTS: exponents}, MXFP4.name, shape)
