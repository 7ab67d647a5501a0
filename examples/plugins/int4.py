"""A compressor: every element in half a byte, as a whole multiple of a scale from −7 to 7.

hcsim run mixed-home --plugin examples/plugins/int4.py --task digits --compressor int4+ef --steps 100
"""

import numpy as np

from hcsim.plugins import FlatCompressor, register_compressor


class Int4(FlatCompressor):
    name = "int4"

    def body_bytes(self, elements):
        return 4 + (elements + 1) // 2  # the scale, then two elements in a byte

    def pack(self, flat, of):
        scale = np.float32(np.abs(flat).max(initial=0) / 7) or np.float32(1)
        multiples = np.zeros(flat.size + flat.size % 2, np.uint8)
        multiples[: flat.size] = np.rint(flat / scale) + 8
        return np.concatenate([scale[None].view(np.uint8), multiples[::2] | multiples[1::2] << 4])

    def unpack(self, body, elements):
        pairs = body[4:]
        multiples = np.stack([pairs & 15, pairs >> 4], axis=1).ravel()[:elements]
        return (multiples.astype(np.float32) - 8) * body[:4].view(np.float32)


register_compressor("int4", "half a byte an element; with one scale for each tensor", Int4)
