"""A compressor: every element as −1, 0 or 1 times a scale, five of them in a byte.

hcsim run mixed-home --plugin examples/plugins/ternary.py --task digits --compressor ternary+ef --steps 100

An element is 0 up to 0.7 of the mean magnitude, and the scale is the mean of all others: Li, Zhang, Liu, "Ternary
weight networks", 2016.
"""

import numpy as np

from hcsim.plugins import FlatCompressor, register_compressor

POWERS = np.array([1, 3, 9, 27, 81], np.uint8)


class Ternary(FlatCompressor):
    name = "ternary"

    def body_bytes(self, elements):
        return 4 + -(-elements // 5)  # the scale, then five elements in a byte

    def pack(self, flat, of):
        magnitudes = np.abs(flat)
        large = magnitudes > 0.7 * magnitudes.mean(dtype=np.float64) if flat.size else magnitudes > 0
        scale = np.float32(magnitudes[large].mean(dtype=np.float64) if large.any() else 0)
        digits = np.ones(-(-flat.size // 5) * 5, np.uint8)
        digits[: flat.size] += large * np.sign(flat).astype(np.int8).view(np.uint8)
        return np.concatenate([scale[None].view(np.uint8), digits.reshape(-1, 5) @ POWERS])

    def unpack(self, body, elements):
        digits = (body[4:, None] // POWERS % 3).reshape(-1)[:elements]
        return (digits.astype(np.float32) - 1) * body[:4].view(np.float32)


register_compressor("ternary", "−1, 0 or 1 times a scale: 1.6 bits an element", Ternary)
