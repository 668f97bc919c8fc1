"""The tokenizer, special tokens and chat template of a Hugging Face directory.

``tokenizer.json`` is taken as it is; where there is only SentencePiece's ``tokenizer.model``, that is
converted. Special tokens and chat template are :mod:`edgespec_models.text.tokenizer_files`' part.
"""

from functools import cached_property
from pathlib import Path

from edgespec_models.errors import ModelFileError, TokenizerError
from edgespec_models.files.facts import Facts
from edgespec_models.text.tokenizer import SpecialTokens, Tokenizer
from edgespec_models.text.tokenizer_files import TokenizerFiles

__all__ = ["HFTokenizer"]

_TOKENIZER, _SENTENCEPIECE, _ADDED = "tokenizer.json", "tokenizer.model", "added_tokens.json"


class HFTokenizer:
    """What a directory says of its tokenizer.

    Args:
        folder: the directory.
        model: its ``config.json``.
        vocab_size: rows of the LM head; the tokenizer may have fewer tokens.
    """

    def __init__(self, folder: Path, model: Facts, vocab_size: int) -> None:
        self._folder, self._vocab_size = folder, vocab_size
        self._beside = TokenizerFiles(folder, model, vocab_size)

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that may be there."""
        names = (_TOKENIZER, _SENTENCEPIECE, _ADDED)
        return (*(self._folder / name for name in names), *self._beside.paths)

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
        text, tokenizer = self._read
        return self._beside.special_tokens(tokenizer, text)

    def chat_template(self) -> str | None:
        """Jinja source. Raises ModelFileError where it is not a text."""
        return self._beside.chat_template()

    def _converted(self, path: Path) -> str:
        from edgespec_export.sources.sentencepiece_model import to_tokenizer_json

        return to_tokenizer_json(path, self._added_tokens())

    def _added_tokens(self) -> dict[int, tuple[str, bool]]:
        """Tokens beyond the SentencePiece model: id to text and whether it is a control token."""
        beside, decoder = (
            Facts.read(self._folder / _ADDED),
            self._beside.config.section("added_tokens_decoder"),
        )
        added = {beside.integer(text): (text, True) for text in beside.keys}
        for key in decoder.keys:
            if not key.isdecimal():
                raise ModelFileError(f"{decoder.where} has the key {key!r}, which is no id")
            entry = decoder.section(key)
            added[int(key)] = (entry.text("content"), entry.boolean("special", default=False))
        return added
