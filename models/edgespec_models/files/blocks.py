"""Blocks of quantized formats, unpacked to one form of codes, scales and offsets.

Every quantized format is ``w = scale * (code - zero) - minimum`` over blocks of 16 or 32 weights; this
module brings each to that form without rounding. Scales and minimums of the K formats are themselves whole
numbers times a float16 of 256 weights. Codes of the IQ formats, MXFP4 and NVFP4 are places in a table of
numbers of 8 bits. Layouts: ggml ``ggml-common.h``; tests compare with the ``gguf``
package's own dequantization.
"""

from base64 import b85decode
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edgespec_models.files.tensors import FLOATS, NVFP4_FACTOR, U8, GGMLType

F16 = npt.NDArray[np.float16]
F32 = npt.NDArray[np.float32]
Steps = npt.NDArray[np.uint8] | npt.NDArray[np.int8]

_NON_LINEAR: Final = bytes((1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241))
_E2M1: Final = bytes((12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0))
_IQ2: Final = bytes((85, 103, 120, 136, 153, 171))
TABLES: Final[Mapping[str, bytes]] = MappingProxyType(
    {
        "IQ4_NL": _NON_LINEAR,
        "IQ4_XS": _NON_LINEAR,
        "MXFP4": _E2M1,
        "NVFP4": _E2M1,
        "IQ2_XS": _IQ2,
        "IQ3_XXS": bytes((0, *range(5, 58, 4), 62)),
        "IQ3_S": bytes(range(1, 32, 2)),
    }
)
"""The codes that the bits of a weight choose from, by format."""

UNITS: Final[Mapping[str, float]] = MappingProxyType({"IQ2_XS": 2**-3, "IQ3_XXS": 2**-1, "NVFP4": 2**-11})
"""What the scales of a format are multiplied with besides."""

WITHIN: Final[Mapping[str, str]] = MappingProxyType({"IQ2_XXS": "IQ2_XS", "IQ2_S": "IQ2_XS"})
"""Formats whose blocks are read as blocks of another format, which has the same values."""

_IQ2_XXS_GRID: Final = (
    "s;DTc2qJ=l03awL00;m803ZSYC;$Qg0000W000UI0)mJDfG8jW3LpXi2mk<}2mk;I004jh00IC2f+!#YC@25`AOHX$001BW0000003Zke0000000"
    "00eAP5Km0stV003d(}00II4fB*mh004j>0000000<xgAOZjYAOHXW00;m800;m800ICA0000000000pnw1%00062004*p000000001h000000ssI"
    "2001Z;004jhfS>>X000082mk;8000UA00000000000)hYlfC2yj00062001BW0ssI200000000000ssI403ZMW0000W0000000000000000001h0"
    "0000015~qf(QtJC?Eg`00IC203ad&00II400II4fB*mj2mpWp000O82mk;e2mk;800000fB*mh00000001Z;00@8p00000AOHXW00@8}00000001"
    "BW001BW2qFpq0000WfB*o1001BW00000fB*mh000000ssI2000000007j004jh000000000W00000fB*mh03Zk;0000W000000006200000001BW"
    "0000000000f&c)3004jh00IC2000620000000IC200;m8004*p000000000004M+e0000W00000000000000000000fB*mh00000000000000000"
    "000000000007l001BW00IC203ZSYAOHXW00000AOHXW0000004O2=2mk^A0000W0000W00008001BW0ssJj000020000000000004jh000000000"
    "00Du4h00000001C>2p|9e0001h00IC20006200000004jh00000AOHdYfB*mh000000001h000000000000000000000000000;m80001h000000"
    "0000000000000003ZMW00;m8AOHXWfB*mh0000003ZMW000000000003ZMW00000000000000000000000000000000000001BW00000AOHXW000"
    "0000000000000000000"
)
_IQ2_XS_GRID: Final = (
    "s;a7rs-l9ZqJS!@stTfl2%vxfDvAgKf*=5ZfB*`rqJpTXfG8jU3ZjAlpnxDC0007l00^J}00IC20;-^hC?J3c00IJ_fB+x>00IaA0Du4>fB*mh00"
    "@98s)`Dtf&!p`04j<I0)hYlfC>N#hyVfr0Du4h01Bdl0HS~hAOHXYf&c)30000000ICY004jh00000pr8OC0ssIY004*p00000AOHXW000000ssI"
    "2006402m*ot0Du4>3J3rK2mlBG000O80Du4h03ZMWB7y({fB*mh00062001Be000080Du6100000000PrfFJ+>fB*;pAOHXW000080Du4hfCvBp0"
    "01I@01B$2f~ug1C?Eg|qJjXRfB+%@0s?}70)PMj00002sG@)<AOHvefB>L?2p|9e00062fPer32mk;8001Z;00@A9fB*mhAP4{ef&c;l00062000"
    "00000003ZjAtpnw1%0007lAON5M000000ssI22mk;80007@fFK|M2m$~AfPw%3000022mk;800;m800;m8ARqz&0s;U4004jh00;tr0000000000"
    "000000ssI4f&c)32nYax015yA0000000000000O8AOHXWfB=93000000000003ZMefB*mh00;m800000000002mk;80001h0000003ZMW0000003"
    "ZMW00;;G00080pn#|#015yA3aEepAP67;0001h03ZMW00Mvjf+#8g2mk^A0ssIY0001h000000ssIY00000fB*mpAOIi$0Dvd}03aX$000000000"
    "0001BW000OeAPAs<03ZN>0Du4hfB*;p004jh000000000W00IC2A^-pYf(QTr0000000;m8001Ze00000fB*mh000000000W00000AOHXW0Du4h0"
    "00002mk;82mk;80HS~(AOHXW004jh000022mk;80w{n02mk;8fB+x>00062000020000000000000000000000IC2AOHdYq5uE@0006AAOHXW000"
    "1>000000H6Q>004jhfB"
)
_IQ2_S_GRID: Final = (
    "s;a7rs-mi>poprfiVC8tD4?h)DvAgSsvrP}hzJU*qN=K@s4Ak03aY9os;Vd|iU<O#AOMOeAPNWo0;sBps;Y_zfPey^svshY2m%5C0Dve6pa=i}00"
    "ICis)~xDs;H=nC@QL|qN=E%swe;oD1w3@pa3W!01Be2D5|O`DvAgKs;Ho<C?E<500JnWfG8jU2mk;As)`^giU<OL0062eAPNWo2mk;e2p|9m03ZM"
    "W001hAsEUH1Ab^MfDhh%EprC*#AOHvm0E!@h005u>BC05$swf}|2mk^opnxbK0Ehqp0HA;XAOIi$0001pC;$ow000620H`1U0000000;m8AOZjY0"
    "3ZT@01B$AqN=K>C?bjqqN<>(swgUo2m*qrAc`m;3IG5Cs;a6gs)`Dtf&i+jC@P8w3W5Ltswf}|2mk^A00=0miVC8F03d(>DvAgKf&c)30ssmK00I"
    "C2000003Zkm0s;Vd|iU0ztsGzDSAPNWo0w|z>C?EhR00020swgUo2m*ot0IDb;3J3rK0000eAOMH}0000004j<I0)henfB*mr2mk^A0000000;mG"
    "000000ssIaqNt#XC?Em|00O9>fG8jU2mlBGAb<cM0Du4h0Dy`pAPNWo0ssI2C?Eg`2mlBGAOIi$00000000O83J3rI000O80DuSp00IC20000000"
    "000AOHXW00IK2qKGIehzNp!0HUfWDvAICf&c=Dr~nEG0000004l183ZjAlpnw1>iU<ON004l1015~I3IG5A00008f`9;^fB*mh0s?>l0Du4j0000"
    "0001BW0H6W@0Dz*Z2r7yQ0)hYlh$sLG2nYZG001Z;00;m800002DvAgKf&c)30ssmK00IC20001p2mk;82mlBG0007l00@8p000003IG5A0Ehqp0"
    "000000000000620EmbPDhL1o001C>000O803ZMW00<xgC;$KeB7gvj2mk^A0001h0tf&I000000000000000AOHXW000620ssI20001h000000ss"
    "IY0007jD1ZO}00;m8fB"
)
"""Which of all magnitudes of eight weights, three each, have a name, the first weight's changing fastest."""

_IQ3_XXS_GRID: Final = (
    "00aPl0zhOAKnMhYECm333&0?T2n2*kD2j*-"
    "gvc<7NF0C=K?o2f0FX%n&}|OTH4jj|0vO?dSVfAM9fn};2_W_d;JyMV;)Li{itw8Nc!!L5bAz}b76AklK`0i13>3kP9|05)2|$ub"
    "2$YE-77+y$Q7I77T@V>TkeMx=8QGE{q7h*Vn5oi}>7x|66OaNxB0^*!f=DcaEF}UUrV5~-"
    "N<^ZH45y0tp~?Xy5+yED2_%y3AriGB8U?6Y9jV%`Ct_l*sxqnSBc?jXt2!VsLqsxzXfZ>$HNyb33kb5yki82bHWLLplT|g-"
    "CAQlRKO<f+E5fv^wzzZ8H?wcCyMRtatWLyqPeh!+l<h$j8BLVo%N&A3WSUB>a>4AQz<fu*{6td)98e9w+>Nx@RZUgZLDyXdR;B7y"
    "<wDZ!7g)Vh*oKg82AE=wIPO-NVBXE?CZgqTZ)QF#<_DmD2LyD-RD6#R^jEQUR{{E8ZSkKfb0-4yFN*N@"
)
_IQ3_S_GRID: Final = (
    "00IC&3IN~$KqLe}gbY9k0)VInzz_uhunzz<2S6AFfIJDn`~V0bgb09uNF<6#2!@F0g2=3i2sn#~T!0WE3J~D{P-"
    "P5IDGHDc2+&ar5b*<0bpg<Q1{fuZSP6ufEr!_5i5L}ySowq4y?`KQ4qz$>piTiGasyx<1So=ls7j2eZi6VYk0{!Q=)(eVX9Dn71M"
    "mZcID>$=ON_X0fq0jI0U#6sfDl0>7D1#QK?oFqEEvJe89~$&fm{#?AeIThkV%A+i42y>Fp)`Ak;&YU5k(qN<q(mH6wwhE5w#JKT@"
    "o3Ao*4y}St*{G4Vc+6m6;uuA)*vvh7#d!6(Q0QVU`jp29{|mkm*j7X$u&!>lrcA5;<d#c}J4Duah}jk@)~30$?fv;2=UoC_=;{f@"
    "m&+3?#xZCjzh`LR2q;94ErOAPPXBN@T7|NUDk~sLD{IN+Bo`;Ubc0Akyt45_K<9Jt@)wq#B{3T1lvyEvDL0p<3CZBH|#TY9!*WBO"
    "+ca;)0@TO0Mb>r)nOcGD9vhD=Tt4Dmo{ux(}y17o-"
    "CuHbbO7Lr5~iY&yeGIRo%BLwGa8AhrvjxJxLuix9DkT)oQyG*byQ(~U7xA+TG8vYTnXn+>xYalae2x7%VeW5zV2E;VBsIin)5Yeu"
    "@OPPr@Ax9i6<Gb6S;3$(khumpfaL<mTP=tRUYK|~xx4B)~{WW<aN%FJ-XOtiujVL()+LX>Sm6!k@v9Y`D{##{-"
    "+oGr@S0z@Q=PUI3p<f6_jD#fg4Nc0;(e5b(tbHjW<P(_4Pg%DW<@Kr_FS;ZjM4WQIbDAdhd&=n<Cl?`0gbyOYU&|T@-"
    "9W~pXebOa@P^C^?B}Uw>HrH)aR6T>#y(DHvq+-"
    "TwVTJ(Uj_B!*MQGMhYgSod)&b~VDd8TfXC_);E@J5J8tOI^Vt!}f2Y`MD2y}<caR-"
    "!jhd}aAi1!b$@)v<{SH*Id4RcpP^xv)bUm|)ZW^kt#bgxqMH!pBM"
)
"""Magnitudes of four weights, three bits each, for every value of a byte, or of nine bits."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows of a quantized matrix.

    Attributes:
        codes: uint8 ``(rows, columns)``.
        zero: the code of 0 (before ``minimums``).
        scales: float32 ``(rows, columns / block)``.
        minimums: float32 like ``scales``, or None where they are all 0.
        bits: how many bits a code takes.
        block: weights that share a scale.
    """

    codes: U8
    zero: int
    scales: F32
    minimums: F32 | None
    bits: int
    block: int

    def values(self) -> F32:
        """The weights of these blocks: float32 ``(rows, columns)``."""
        rows, columns = self.codes.shape
        grouped = self.codes.reshape(rows, -1, self.block).astype(np.float32)
        if self.zero:
            grouped -= self.zero
        grouped *= self.scales[..., None]
        if self.minimums is not None:
            grouped -= self.minimums[..., None]
        return grouped.reshape(rows, columns)


@dataclass(frozen=True, slots=True)
class Fields:
    """The numbers of a file for rows of a quantized matrix.

    A file block is 32 weights, of K formats 256 in ``n`` blocks with a whole number for a scale each.

    Attributes:
        codes: uint8 ``(rows, columns)``.
        zero: the code of 0 (before minimums), from the format's table if there is one.
        bits: how many bits a code takes.
        factors: float16 ``(rows, file blocks)``, factors of the scales. Uint8 are exponents of two plus 128.
        scales: uint8 or int8 ``(rows, file blocks, n)``; None if the factor is the scale. In NVFP4 they are
            floats of 8 bits without a sign, four of them an exponent.
        minimum_factors: float16 like ``factors``; None if minimums are all 0.
        minimums: uint8 like ``scales``; None if the factor is the minimum.
        form: the format whose table (:data:`TABLES`) and unit (:data:`UNITS`) hold; empty without both.
    """

    codes: U8
    zero: int
    bits: int
    factors: F16 | U8
    scales: Steps | None = None
    minimum_factors: F16 | None = None
    minimums: U8 | None = None
    form: str = ""

    def blocks(self) -> Blocks:
        """The same numbers multiplied out in float32, which holds each product exactly."""
        steps = _small_floats(self.scales) if self.form == "NVFP4" else self.scales
        scales = _product(self.factors, steps) * np.float32(UNITS.get(self.form, 1))
        minimums = None if self.minimum_factors is None else _product(self.minimum_factors, self.minimums)
        codes, bits = self.codes, self.bits
        if self.form in TABLES:
            codes, bits = np.frombuffer(TABLES[self.form], np.uint8)[codes], 8
        return Blocks(codes, self.zero, scales, minimums, bits, codes.shape[1] // scales.shape[1])


def unpack(kind: GGMLType, raw: U8) -> Blocks | F32:
    """Unpack raw blocks, uint8 ``(rows, blocks, bytes)``.

    Returns:
        :class:`Blocks`, or float32 ``(rows, columns)`` for the floating-point formats.
    """
    if kind in FLOATS:
        return _floats(kind, raw.reshape(raw.shape[0], -1))
    return fields(kind, raw).blocks()


def fields(kind: GGMLType, raw: U8) -> Fields:
    """The numbers of raw blocks of a quantized format, uint8 ``(rows, blocks, bytes)``."""
    return _READERS[kind](raw)


def values_of(source: Blocks | F32) -> F32:
    """The weights of :func:`unpack`, float32 ``(rows, columns)``."""
    return source.values() if isinstance(source, Blocks) else source


def largest(source: Blocks | F32) -> float:
    """The largest magnitude among the weights, or scales and minimums; infinite where one is not finite."""
    arrays = [source] if not isinstance(source, Blocks) else [source.scales]
    if isinstance(source, Blocks) and source.minimums is not None:
        arrays.append(source.minimums)
    extremes = [float(end) for array in arrays for end in (-array.min(), array.max())]
    return max(extremes) if np.isfinite(extremes).all() else float("inf")


def _floats(kind: GGMLType, raw: U8) -> F32:
    if kind is GGMLType.BF16:
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view(np.float32 if kind is GGMLType.F32 else np.float16).astype(np.float32, copy=False)


def _small_floats(steps: Steps | None) -> F32:
    assert steps is not None  # which the format has
    numbers = steps.astype(np.int32)
    normal = ((numbers << 20) + (120 << 23)).view(np.float32)
    return np.where(numbers > 7, normal, numbers * np.float32(2**-9))


def _product(factors: F16 | U8, steps: Steps | F32 | None) -> F32:
    if factors.dtype == np.uint8:
        powers: F32 = np.ldexp(np.float32(1), factors.astype(np.int32) - 128)
        return powers
    exact = factors.astype(np.float32)
    return exact if steps is None else (exact[..., None] * steps).reshape(len(exact), -1)


def _half(raw: U8, start: int) -> F16:
    """The float16 at byte ``start`` of every block: ``(rows, blocks)``."""
    halves: F16 = np.ascontiguousarray(raw[..., start : start + 2]).view("<f2")[..., 0]
    return halves


def _pieces(packed: U8, bits: int) -> U8:
    """Numbers of ``bits`` bits: the lowest of all bytes (the last axis) first, then those above them."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    pieces = packed[..., None, :] >> shifts
    pieces &= np.uint8((1 << bits) - 1)
    flat: U8 = pieces.reshape(*packed.shape[:-1], -1)
    return flat


def _flat(codes: U8) -> U8:
    return codes.reshape(codes.shape[0], -1)


def _q4_0(raw: U8) -> Fields:
    return Fields(_flat(_pieces(raw[..., 2:], 4)), 8, 4, _half(raw, 0))


def _q4_1(raw: U8) -> Fields:
    return Fields(_flat(_pieces(raw[..., 4:], 4)), 0, 4, _half(raw, 0), minimum_factors=-_half(raw, 2))


def _five_bits(high: U8, low: U8) -> U8:
    bits = np.unpackbits(np.ascontiguousarray(high), axis=-1, bitorder="little")
    bits <<= np.uint8(4)
    return _flat(_pieces(low, 4) | bits)


def _q5_0(raw: U8) -> Fields:
    return Fields(_five_bits(raw[..., 2:6], raw[..., 6:]), 16, 5, _half(raw, 0))


def _q5_1(raw: U8) -> Fields:
    codes = _five_bits(raw[..., 4:8], raw[..., 8:])
    return Fields(codes, 0, 5, _half(raw, 0), minimum_factors=-_half(raw, 2))


def _q8_0(raw: U8) -> Fields:
    # Two's complement plus 128 is the same byte with its sign bit flipped.
    return Fields(_flat(raw[..., 2:] ^ np.uint8(128)), 128, 8, _half(raw, 0))


def _q2_k(raw: U8) -> Fields:
    # 128 weights to 32 bytes: the lowest two bits are the first 32 weights.
    codes = _pieces(raw[..., 16:80].reshape(*raw.shape[:2], 2, 32), 2)
    scales, minimums = raw[..., :16] & np.uint8(15), raw[..., :16] >> np.uint8(4)
    return Fields(_flat(codes), 0, 2, _half(raw, 80), scales, _half(raw, 82), minimums)


def _q3_k(raw: U8) -> Fields:
    codes = _pieces(raw[..., 32:96].reshape(*raw.shape[:2], 2, 32), 2).reshape(*raw.shape[:2], 256)
    high = _pieces(raw[..., :32], 1)
    high <<= np.uint8(2)
    codes |= high
    scales = _pieces(raw[..., 96:104], 4) | _pieces(raw[..., 104:108], 2) << np.uint8(4)
    return Fields(_flat(codes), 4, 3, _half(raw, 108), scales.view(np.int8) - np.int8(32))


def _six_bit_scales(packed: U8) -> tuple[U8, U8]:
    """Scales and minimums of Q4_K and Q5_K, 8 of each in 12 bytes."""
    low, high, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([low & 63, (rest & 15) | ((low >> 6) << 4)], axis=-1)
    minimums = np.concatenate([high & 63, (rest >> 4) | ((high >> 6) << 4)], axis=-1)
    return scales, minimums


def _q4_k(raw: U8) -> Fields:
    scales, minimums = _six_bit_scales(raw[..., 4:16])
    # 64 weights to 32 bytes: the low nibbles are one block of 32, the high nibbles the next.
    codes = _pieces(raw[..., 16:].reshape(*raw.shape[:2], 4, 32), 4)
    return Fields(_flat(codes), 0, 4, _half(raw, 0), scales, _half(raw, 2), minimums)


def _q5_k(raw: U8) -> Fields:
    scales, minimums = _six_bit_scales(raw[..., 4:16])
    codes = _pieces(raw[..., 48:].reshape(*raw.shape[:2], 4, 32), 4).reshape(*raw.shape[:2], 256)
    high = _pieces(raw[..., 16:48], 1)
    high <<= np.uint8(4)
    codes |= high
    return Fields(_flat(codes), 0, 5, _half(raw, 0), scales, _half(raw, 2), minimums)


def _q6_k(raw: U8) -> Fields:
    rows, blocks = raw.shape[:2]
    codes = _pieces(raw[..., :128].reshape(rows, blocks, 2, 64), 4)
    high = _pieces(raw[..., 128:192].reshape(rows, blocks, 2, 32), 2)
    high <<= np.uint8(4)
    codes |= high
    scales = np.ascontiguousarray(raw[..., 192:208]).view(np.int8)
    return Fields(_flat(codes), 32, 6, _half(raw, 208), scales)


def _iq4_nl(raw: U8) -> Fields:
    return Fields(_flat(_pieces(raw[..., 2:], 4)), 128, 4, _half(raw, 0), form="IQ4_NL")


def _iq4_xs(raw: U8) -> Fields:
    shape = raw.shape[:2]
    scales = _pieces(raw[..., 4:8, None], 4) | _pieces(raw[..., 2:4, None], 2).reshape(*shape, 4, 2) << 4
    codes = _pieces(raw[..., 8:].reshape(*shape, 8, 16), 4)
    steps = scales.reshape(*shape, 8).view(np.int8) - np.int8(32)
    return Fields(_flat(codes), 128, 4, _half(raw, 0), steps, form="IQ4_XS")


def _nvfp4(raw: U8) -> Fields:
    codes, scales = _flat(_pieces(raw[..., 4:36].reshape(*raw.shape[:2], 4, 8), 4)), raw[..., :4]
    scales = np.where(scales == 127, np.uint8(0), scales & np.uint8(127))  # no number there
    own = _half(raw, 36) if raw.shape[-1] > 36 else np.full(raw.shape[:2], NVFP4_FACTOR, np.float16)
    return Fields(codes, 12, 4, own, scales, form="NVFP4")


def _mxfp4(raw: U8) -> Fields:
    return Fields(_flat(_pieces(raw[..., 1:], 4)), 12, 4, raw[..., 0], form="MXFP4")


@cache
def _quadruples(text: str) -> U8:
    """A grid in base 85, unpacked: uint8 ``(names, 4)``; the lowest magnitude is 0."""
    bits = np.unpackbits(np.frombuffer(b85decode(text), np.uint8))
    packed: U8 = np.packbits(bits.reshape(-1, 4, 3), axis=-1)[..., 0] >> np.uint8(5)
    return packed


@cache
def _octets(text: str) -> U8:
    """The same of a grid of eight weights: uint8 ``(names, 8)``."""
    names = np.flatnonzero(np.unpackbits(np.frombuffer(b85decode(text), np.uint8)))
    levels: U8 = (names[:, None] // 3 ** np.arange(8) % 3).astype(np.uint8)
    return levels


def _places(levels: U8, signs: U8, count: int) -> U8:
    """Places in a table of ``count`` magnitudes and as many below zero, which bits of ``signs`` choose."""
    negative = np.unpackbits(np.ascontiguousarray(signs), axis=-1, bitorder="little").astype(bool)
    flat = levels.reshape(len(levels), -1)
    return np.where(negative.reshape(flat.shape), np.uint8(count - 1) - flat, np.uint8(count) + flat)


def _of_seven(bits: npt.NDArray[np.integer[Any]]) -> U8:
    """Signs of eight weights. The last sign makes the number of negative weights even."""
    seven: U8 = bits.astype(np.uint8) & np.uint8(127)
    odd: U8 = np.unpackbits(seven[..., None], axis=-1).sum(axis=-1, dtype=np.uint8) & np.uint8(1)
    return seven | odd << np.uint8(7)


def _odd(steps: npt.NDArray[np.integer[Any]]) -> U8:
    """Scales, which are stored as halves."""
    return steps.astype(np.uint8) * np.uint8(2) + np.uint8(1)


_SEVENS: Final = (0, 7, 14, 21)  # where signs lie in 32 bits, below a scale


def _words(raw: U8) -> tuple[U8, U8]:
    """The signs in words of 32 bits, uint8 ``(..., 4 of a word)``, and the scales."""
    words = np.ascontiguousarray(raw).view("<u4")
    return _of_seven(words[..., None] >> np.array(_SEVENS, np.uint32)), _odd(words >> np.uint32(28))


def _iq2(raw: U8, levels: U8, signs: U8, steps: U8) -> Fields:
    places = _places(levels, signs, 3)
    return Fields(places, 128, 3, _half(raw, 0), steps, form="IQ2_XS")


def _iq2_xxs(raw: U8) -> Fields:
    pairs = raw[..., 2:].reshape(*raw.shape[:2], 8, 8)
    signs, steps = _words(pairs[..., 4:])
    levels = _octets(_IQ2_XXS_GRID)[pairs[..., :4]]
    return _iq2(raw, levels, signs, np.repeat(steps[..., 0], 2, axis=-1))


def _iq2_xs(raw: U8) -> Fields:
    words = np.ascontiguousarray(raw[..., 2:66]).view("<u2")
    levels, steps = _octets(_IQ2_XS_GRID)[words & np.uint16(511)], _pieces(raw[..., 66:, None], 4)
    return _iq2(raw, levels, _of_seven(words >> np.uint16(9)), _odd(steps.reshape(*raw.shape[:2], 16)))


def _iq2_s(raw: U8) -> Fields:
    above = _pieces(raw[..., 66:74, None], 2).reshape(*raw.shape[:2], 32).astype(np.uint16)
    levels = _octets(_IQ2_S_GRID)[raw[..., 2:34] | above << np.uint16(8)]
    steps = _odd(_pieces(raw[..., 74:, None], 4).reshape(*raw.shape[:2], 16))
    return _iq2(raw, levels, raw[..., 34:66], steps)


def _iq3_xxs(raw: U8) -> Fields:
    signs, steps = _words(raw[..., 66:])
    places = _places(_quadruples(_IQ3_XXS_GRID)[raw[..., 2:66]], signs, 8)
    return Fields(places, 31, 4, _half(raw, 0), steps, form="IQ3_XXS")


def _iq3_s(raw: U8) -> Fields:
    ninth = np.unpackbits(np.ascontiguousarray(raw[..., 66:74]), axis=-1, bitorder="little")
    names = raw[..., 2:66] | ninth.astype(np.uint16) << np.uint16(8)
    places = _places(_quadruples(_IQ3_S_GRID)[names], raw[..., 74:106], 8)
    steps = _odd(_pieces(raw[..., 106:, None], 4).reshape(*raw.shape[:2], 8))
    return Fields(places, 16, 4, _half(raw, 0), steps, form="IQ3_S")


_READERS = {
    GGMLType.IQ2_XXS: _iq2_xxs,
    GGMLType.IQ2_XS: _iq2_xs,
    GGMLType.IQ2_S: _iq2_s,
    GGMLType.IQ3_XXS: _iq3_xxs,
    GGMLType.IQ3_S: _iq3_s,
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q5_1: _q5_1,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q2_K: _q2_k,
    GGMLType.Q3_K: _q3_k,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k,
    GGMLType.IQ4_NL: _iq4_nl,
    GGMLType.IQ4_XS: _iq4_xs,
    GGMLType.MXFP4: _mxfp4,
    GGMLType.NVFP4: _nvfp4,
}
