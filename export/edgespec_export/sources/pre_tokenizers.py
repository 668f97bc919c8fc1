"""The cuts of byte-level BPE before merges, by their names in GGUF files.

A rule is a list of regular expressions in Oniguruma's syntax: the first cuts the text, the next cuts the
pieces, and so on. Matches become pieces, and so do the texts between them. The names are taken from
llama.cpp's ``llama-vocab.cpp``. Where llama.cpp approximates a published expression (letters with case beyond
ASCII, combining marks, groups of digits), the published one is here, because models were trained with it.
"""

from collections.abc import Mapping
from types import MappingProxyType

_SHORT = "'s|'t|'re|'ve|'m|'ll|'d"
_ENGLISH = f"(?i:{_SHORT})"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_SIGNS = r" ?[^\s\p{L}\p{N}]+"
_SPACES = r"\s+(?!\S)|\s+"
_LINES, _LINE = rf"\s*[\r\n]+|{_SPACES}", rf"\s*[\r\n]|{_SPACES}"
_DIGIT, _THREE = r"\p{N}", r"\p{N}{1,3}"
_KANA = r"[一-龥\x{3040}-ゟ゠-ヿ]+"


def _modern(
    digits: str,
    *,
    english: str = f"{_ENGLISH}|",
    word: str = r"\p{L}+",
    signs: str = rf"{_SIGNS}[\r\n]*",
    lines: str = _LINES,
) -> str:
    """A cut like cl100k_base's."""
    return f"{english}{_LEAD}{word}|{digits}|{signs}|{lines}"


def _cased(digits: str, *, end: str = f"{_ENGLISH}?", but: str = "", lines: str = r"[\r\n/]*") -> str:
    """A cut like o200k_base's: a capital letter behind a small one starts a word; many letters are both."""
    capital, small = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
    words = f"{_LEAD}{capital}*{small}+{end}|{_LEAD}{capital}+{small}*{end}"
    return f"{words}|{digits}|{_SIGNS}{lines}|{_LINES}"


_GPT2 = rf"{_SHORT}| ?\p{{L}}+| ?\p{{N}}+|{_SIGNS}|{_SPACES}"
_QWEN2, _LLAMA3, _GPT4O = _modern(_DIGIT), _modern(_THREE), _cased(_THREE)
_JAIS = "|".join(
    rf"\s{{{count}}}(?!\S)" for count in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")
)
_KIMI = r"\p{Han}+|" + _cased(_THREE, but=r"&&[^\p{Han}]", lines=r"[\r\n]*")
_WIDE = r"[一-龥ࠀ-一가-\x{d7ff}]+"
# Letters with case that DeepSeek's first list lacks: its Unicode was older, its alphabets were fewer.
_UNLISTED = (
    r"\x{560}-\x{588}\x{10c7}-\x{10ff}\x{1c80}-\x{1c8f}\x{2d00}-\x{2d2d}\x{a78f}-\x{a7ff}\x{ab30}-\x{ab6f}"
    r"\x{10570}-\x{105bf}\x{10d40}-\x{10d8f}\x{16e40}-\x{16e7f}\x{1d400}-\x{1d7ff}\x{1df00}-\x{1dfff}"
)
_OLD_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?[\p{{Lu}}\p{{Ll}}\p{{Lt}}&&[^{_UNLISTED}]]+",
    r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}‘-‟\x{3000}-\x{3002}]+",
    r"\s+$",
    _WIDE,
    _DIGIT,
)
_DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+"
)
_CLAUSE = r" ?[^(\s|.,!?…。，、।۔،)]+"
_PHRASE = r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"
_YOUTU = r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-\x{303f}︰-\x{fe4f}]+|[ㄅ-ㄯ]+|" + _KANA
_IMAGES = ("<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", _DIGIT, r"[\p{P}!-/:-@\[-`{-~]")


_RULES: Mapping[str, tuple[str, ...]] = {
    "default": (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9]{3}"),
    "falcon": (r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9]{3}"),
    "gpt-2 phi-2 mpt olmo jais trillion exaone4 gigachat a.x-4.0 mellum granite-docling": (_GPT2,),
    "jina-v1-en jina-v2-code jina-v2-de jina-v2-es jina-de jina-es modern-bert roberta-bpe": (_GPT2,),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": (_DIGIT, _GPT2),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": (_LLAMA3,),
    "dbrx smaug-bpe chatglm-bpe glm4 glm5": (_LLAMA3,),
    "jais-2": (_modern(_THREE, lines=rf"\s*[\r\n]+|{_JAIS}|\s"),),
    "minicpm5": (_THREE, _modern(r"\p{N}+")),
    "qwen2 deepseek-r1-qwen stablelm2 megrez hunyuan solar-open grok-2 kormo f2llmv2": (_QWEN2,),
    "qwen35": (_modern(_DIGIT, word=r"[\p{L}\p{M}]+", signs=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),),
    "laguna": (r"[^\n]+|\n+", _QWEN2),
    "ufakzeka": (_modern(_DIGIT, english=""),),
    "seed-coder": (_modern(_DIGIT, signs=r" ?[^\s\p{L}\p{N}\r\n]+"),),
    "bailingmoe bailingmoe2 llada-moe": (_modern(_DIGIT, lines=_LINE),),
    "exaone-moe": (_modern(_DIGIT, word=_PHRASE, signs=rf"{_SIGNS}[\r\n/]?", lines=_LINE),),
    "tekken": (_cased(_DIGIT, end=""),),
    "gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m": (_GPT4O,),
    "tiny_aya cohere2moe": (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O),
    "kimi-k2": (_KIMI,),
    "youtu": (_YOUTU, _cased(_DIGIT)),
    "deepseek-llm": _OLD_DEEPSEEK,
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _WIDE, _DIGIT),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": (_THREE, _KANA, rf"{_DEEPSEEK}[\r\n]*|{_LINES}"),
    "spark2_5": (_THREE, _KANA, rf"{_DEEPSEEK}|[\r\n]|{_SPACES}", _DIGIT),
    "bloom poro-chat gpt3-finnish": (_CLAUSE,),
    "viking": (_CLAUSE, _DIGIT),
    "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    "chameleon": (*_IMAGES, _GPT2),
}
_WHOLE_LLAMA = "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano tekken"

CUTS = MappingProxyType({name: cuts for names, cuts in _RULES.items() for name in names.split()})
"""By name."""
SAMPLES = tuple(names.split()[0] for names in _RULES)
"""One name of each rule, for messages."""
WHOLE_PIECES = frozenset(f"{_WHOLE_LLAMA} glm4 glm5 minicpm5 youtu granite-embed-multi-97m".split())
"""Names with which a piece that is a token stays a token, in spite of the merges."""
ADD_BOS = frozenset(f"{_WHOLE_LLAMA} chameleon".split())
"""Names with which a prompt starts with BOS by default."""
