"""The tokenizer, special tokens and chat template of a Hugging Face directory.

``tokenizer.json`` is taken as it is; where there is only SentencePiece's ``tokenizer.model``, that is
converted.
What ends generation: the tokens that ``tokenizer_config.json``, ``generation_config.json`` and
``config.json`` name, and the well-known ones among the control tokens, as with GGUF files.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import tokenizers

from edgespec_export.gguf_tokenizer import END_OF_GENERATION
from edgespec_export.hf_facts import Facts
from edgespec_models.errors import ModelFileError, TokenizerError
from edgespec_models.tokenizer import SpecialTokens, Tokenizer

__all__ = ["HFTokenizer"]

_TOKENIZER, _SENTENCEPIECE, _ADDED = "tokenizer.json", "tokenizer.model", "added_tokens.json"
_CONFIG, _GENERATION, _TEMPLATE = "tokenizer_config.json", "generation_config.json", "chat_template.jinja"


class HFTokenizer:
    """What a directory says of its tokenizer.

    Args:
        folder: the directory.
        model: its ``config.json``.
        vocab_size: rows of the LM head; the tokenizer may have fewer tokens.
    """

    def __init__(self, folder: Path, model: Facts, vocab_size: int) -> None:
        self._folder, self._vocab_size = folder, vocab_size
        self._facts = Facts.read(folder / _CONFIG)
        self._id_sources = (Facts.read(folder / _GENERATION), model)

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that may be there."""
        names = (_TOKENIZER, _SENTENCEPIECE, _ADDED, _CONFIG, _GENERATION, _TEMPLATE)
        return tuple(self._folder / name for name in names)

    @property
    def json(self) -> str:
        """The text of a ``tokenizer.json`` that edgespec can read.

        Raises:
            ModelFileError: there is no tokenizer, or it is damaged.
            TokenizerError: of an unknown kind, or with more tokens than the model has rows.
        """
        return self._read[0]

    @cached_property
    def _read(self) -> tuple[str, Tokenizer]:
        where = self._folder / _TOKENIZER
        if where.is_file():
            try:
                text = where.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelFileError(f"cannot read {where}: {error}. Download or copy it again.") from error
        elif (self._folder / _SENTENCEPIECE).is_file():
            text = self._converted(self._folder / _SENTENCEPIECE)
        else:
            raise ModelFileError(
                f"{self._folder} has neither {_TOKENIZER} nor {_SENTENCEPIECE}. Download one of them too."
            )
        try:
            return text, Tokenizer.from_json(text, vocab_size=self._vocab_size)
        except TokenizerError as error:
            raise TokenizerError(f"{where}: {error}") from error

    def special_tokens(self) -> SpecialTokens:
        """Raises as :attr:`json` does, and ModelFileError where ids are malformed or out of range."""
        tokenizer = self._read[1]
        bos = self._first("bos", tokenizer)
        eos = [*self._named("eos", tokenizer), *self._listed("eos")]
        eos += [id_ for text in END_OF_GENERATION if (id_ := tokenizer.special_id(text)) is not None]
        return SpecialTokens(
            bos=bos,
            eos=tuple(dict.fromkeys(eos)),
            add_bos=bos is not None and self._facts.boolean("add_bos_token", default=self._starts_with(bos)),
            pad=self._first("pad", tokenizer),
        )

    def chat_template(self) -> str | None:
        """Jinja source. Raises ModelFileError where it is not a text."""
        where = self._folder / _TEMPLATE
        if where.is_file():
            try:
                return where.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelFileError(f"cannot read {where}: {error}. Download or copy it again.") from error
        template = self._facts.value("chat_template")
        if isinstance(template, list):  # several by name
            objects = (entry for entry in template if isinstance(entry, dict))
            template = next((e.get("template") for e in objects if e.get("name") == "default"), None)
        if template is None or isinstance(template, str):
            return template
        raise ModelFileError(f"{self._facts.where}: chat_template is {type(template).__name__}, not a text")

    def _first(self, role: str, tokenizer: Tokenizer) -> int | None:
        return next(iter((*self._named(role, tokenizer), *self._listed(role))), None)

    def _named(self, role: str, tokenizer: Tokenizer) -> Iterator[int]:
        """The token that ``tokenizer_config.json`` gives as text, alone or in an object."""
        value = self._facts.value(f"{role}_token")
        text = value.get("content") if isinstance(value, dict) else value
        id_ = tokenizer.special_id(text) if isinstance(text, str) else None
        if id_ is not None:
            yield id_

    def _listed(self, role: str) -> Iterator[int]:
        """The ids that the generation's and the model's configuration give, one or a list each."""
        for facts in self._id_sources:
            value = facts.value(f"{role}_token_id")
            for id_ in value if isinstance(value, list) else [] if value is None else [value]:
                if type(id_) is not int or not 0 <= id_ < self._vocab_size:
                    raise ModelFileError(
                        f"{facts.where}: {role}_token_id is {value!r}, but must be an id in "
                        f"0 .. {self._vocab_size - 1}"
                    )
                yield id_

    def _starts_with(self, bos: int) -> bool:
        """Whether the tokenizer's own template puts ``bos`` before a text."""
        encoding = tokenizers.Tokenizer.from_str(self.json).encode("a", add_special_tokens=True)
        return encoding.ids[:1] == [bos]

    def _converted(self, path: Path) -> str:
        from edgespec_export.sentencepiece_model import to_tokenizer_json

        return to_tokenizer_json(path, self._added_tokens())

    def _added_tokens(self) -> dict[int, tuple[str, bool]]:
        """Tokens beyond the SentencePiece model: id to text and whether it is a control token."""
        beside, decoder = Facts.read(self._folder / _ADDED), self._facts.section("added_tokens_decoder")
        added = {beside.integer(text): (text, True) for text in beside.keys}
        for key in decoder.keys:
            if not key.isdecimal():
                raise ModelFileError(f"{decoder.where} has the key {key!r}, which is no id")
            entry = decoder.section(key)
            added[int(key)] = (entry.text("content"), entry.boolean("special", default=False))
        return added
