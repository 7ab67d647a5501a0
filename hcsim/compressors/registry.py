"""The registry of compressors, by the names that files, flags and tables use."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple, TypeAlias

from hcsim.compressors.base import Compressor
from hcsim.compressors.block_scaled import USUAL_BLOCK, Int2, Int4, Int8
from hcsim.compressors.block_sparse import BlockTopK, DctTopK
from hcsim.compressors.cast import Bf16, Dense, Fp16
from hcsim.compressors.feedback import SUFFIX, ErrorFeedback
from hcsim.compressors.lossless import Lossless
from hcsim.compressors.one_bit import OneBit
from hcsim.compressors.powersgd import PowerSGD
from hcsim.compressors.sparse import RandomK, TopK
from hcsim.errors import ConfigError
from hcsim.registry import Registry
from hcsim.units import did_you_mean


class CompressorForm(NamedTuple):
    """The entry of a compressor in help texts."""

    form: str
    """The syntax."""
    description: str
    """What it sends, and the effect of its parameter."""


CompressorFactory: TypeAlias = Callable[[str, int, int], Compressor]
"""Creates a compressor from its argument ("" if there is none), the seed and the rank; a `ValueError`
describes valid arguments."""


class _Entry(NamedTuple):
    spec: CompressorForm
    make: CompressorFactory


def make(spec: str, *, seed: int, rank: int) -> Compressor:
    """Create a compressor for one rank from a spec: "none", "topk:0.01+ef", "int8:block=256,stochastic"."""
    plain = spec.removesuffix(SUFFIX)
    name, colon, argument = plain.partition(":")
    if name not in _ENTRIES:
        forms = ", ".join(entry.spec.form for entry in _ENTRIES.values())
        hint = did_you_mean(name, [*_ENTRIES, *(known + SUFFIX for known in _ENTRIES)])
        raise ConfigError(f"{spec!r} is no compressor{hint}; known are {forms}, each also with {SUFFIX}")
    entry = _ENTRIES[name]
    try:
        if colon and not argument:
            raise ValueError("nothing stands after the colon")
        if argument and ":" not in entry.spec.form:
            raise ValueError("it takes no argument")
        compressor = entry.make(argument, seed, rank)
    except ValueError as problem:
        raise ConfigError(f"{spec!r}: {problem}; {name} is written {entry.spec.form}") from problem
    return ErrorFeedback(compressor) if plain != spec else compressor


def register(form: str, description: str, make: CompressorFactory) -> None:
    """Register a plugin's compressor. `form` is its syntax: "int4" or "int4[:BLOCK]"."""
    _ENTRIES.add(_name(form), _Entry(CompressorForm(form, description), make))


def specs() -> tuple[CompressorForm, ...]:
    """Return all known compressors, for help texts and error messages."""
    feedback = CompressorForm(f"…{SUFFIX}", "any of these with error feedback: what is not sent now is sent later")
    return (*(entry.spec for entry in _ENTRIES.values()), feedback)


def _name(form: str) -> str:
    return form.partition(":")[0].partition("[")[0]


def _ratio(argument: str) -> Fraction:
    if re.fullmatch(r"\d*\.?\d+(e-?\d{1,2})?", argument, re.ASCII) and 0 < (ratio := Fraction(argument)) <= 1:
        return ratio
    raise ValueError("expected a ratio above 0 and up to 1, such as 0.01")


def _whole(argument: str, least: int, most: int, what: str) -> int:
    if re.fullmatch(r"\d{1,6}", argument, re.ASCII) and least <= (number := int(argument)) <= most:
        return number
    raise ValueError(f"expected {what} from {least} to {most}")


def _plain(compressor: Callable[[], Compressor]) -> CompressorFactory:
    return lambda _argument, _seed, _rank: compressor()


def _multiples(kind: type[Int8]) -> CompressorFactory:
    def made(argument: str, seed: int, rank: int) -> Compressor:
        block, stochastic = _block_settings(argument, kind.usual_block)
        return kind(block, stochastic=stochastic, seed=seed, rank=rank)

    return made


def _int2(argument: str, _seed: int, _rank: int) -> Compressor:
    block, stochastic = _block_settings(argument, USUAL_BLOCK)
    if stochastic:
        raise ValueError("two bits are too few to be right on average")
    return Int2(block)


def _block_settings(argument: str, usual: int) -> tuple[int, bool]:
    block: int | None = None
    stochastic = False
    for setting in argument.split(",") if argument else ():
        key, _, value = setting.partition("=")
        if key == "block" and block is None:
            block = _whole(value, 16, 1 << 15, "a block, a power of two,")
            if block & (block - 1):
                raise ValueError(f"a block of {block} is not a power of two")
        elif setting == "stochastic" and not stochastic:
            stochastic = True
        else:
            raise ValueError(f"{setting!r} is not a setting, or stands twice")
    return usual if block is None else block, stochastic


def _block_sparse(kind: type[BlockTopK]) -> CompressorFactory:
    def made(argument: str, _seed: int, _rank: int) -> Compressor:
        ratio, comma, setting = argument.partition(",")
        if comma and setting != "bits=2":
            raise ValueError(f"{setting!r} is not a setting")
        return kind(_ratio(ratio), 2 if comma else 32)

    return made


def _zstd(argument: str, _seed: int, _rank: int) -> Compressor:
    return Lossless(_whole(argument, 1, 19, "a level") if argument else None)


def _powersgd(argument: str, seed: int, _rank: int) -> Compressor:
    return PowerSGD(_whole(argument, 1, 1024, "a rank"), seed)


_OWN = (
    _Entry(CompressorForm("none", "every element as it is"), _plain(lambda: Dense("none"))),
    _Entry(
        CompressorForm("topk:RATIO", "the largest elements and their places; a lower ratio sends less"),
        lambda argument, _seed, _rank: TopK(_ratio(argument)),
    ),
    _Entry(
        CompressorForm("blocktopk:RATIO[,bits=2]", "the largest elements of each block of 4096, with short places"),
        _block_sparse(BlockTopK),
    ),
    _Entry(
        CompressorForm("dcttopk:RATIO[,bits=2]", "the largest coefficients of each block's cosine transform"),
        _block_sparse(DctTopK),
    ),
    _Entry(
        CompressorForm("randomk:RATIO", "elements chosen at random, alike on all ranks; a lower ratio sends less"),
        lambda argument, seed, _rank: RandomK(_ratio(argument), seed),
    ),
    _Entry(
        CompressorForm("fp16", "two bytes an element: 11 significant bits, up to 65504"), _plain(lambda: Fp16("fp16"))
    ),
    _Entry(
        CompressorForm("bf16", "two bytes an element: 8 significant bits, the range of float32"),
        _plain(lambda: Bf16("bf16")),
    ),
    _Entry(
        CompressorForm(
            "int8[:block=N][,stochastic]",
            "one byte an element; smaller blocks err less and send more, stochastic rounds right on average",
        ),
        _multiples(Int8),
    ),
    _Entry(
        CompressorForm("int4[:block=N][,stochastic]", "half a byte an element, in blocks of 256; otherwise as int8"),
        _multiples(Int4),
    ),
    _Entry(
        CompressorForm("int2[:block=N]", "two bits an element, in blocks of 256: the sign and one of two magnitudes"),
        _int2,
    ),
    _Entry(CompressorForm("onebit", "the signs and the mean magnitude"), _plain(OneBit)),
    _Entry(CompressorForm("powersgd:RANK", "two thin factors of each matrix; a lower rank sends less"), _powersgd),
    _Entry(CompressorForm("zstd[:LEVEL]", "every bit, packed; a higher level sends a little less, much slower"), _zstd),
)

_ENTRIES = Registry("compressor", {_name(entry.spec.form): entry for entry in _OWN})
