"""Special tokens and chat template, as the files beside a Hugging Face tokenizer state them.

What ends generation: the tokens that ``tokenizer_config.json``, ``generation_config.json`` and the model's
configuration name, and the well-known ones among the control tokens, as with GGUF files.
"""

from collections.abc import Iterator
from pathlib import Path

from edgespec_models.errors import ModelFileError, TokenizerError
from edgespec_models.files.facts import Facts
from edgespec_models.schema import read_text
from edgespec_models.text.template_files import AS_JSON, BESIDE, DEFAULT, templates
from edgespec_models.text.tokenizer import SpecialTokens, Tokenizer

END_OF_GENERATION = (
    *("<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>"),
    *("<|call|>", "<end_of_turn>", "<turn|>", "<|tool_response>", "<eos>", "</s>", "<EOT>", "[EOT]", "[EOS]"),
    *("<end_of_utterance>", "<｜end▁of▁sentence｜>"),
)
"""Control tokens that end generation in the models that have them."""

_CONFIG, _GENERATION = "tokenizer_config.json", "generation_config.json"


class TokenizerFiles:
    """What a directory says beside its tokenizer; ModelFileError where one of the files is damaged.

    ``model`` is the model's configuration, for ``bos_token_id`` and the like. The tokenizer may have fewer
    tokens than ``vocab_size``, the rows of the LM head.
    """

    def __init__(self, folder: Path, model: Facts, vocab_size: int) -> None:
        self._folder, self._vocab_size = folder, vocab_size
        names = (_CONFIG, _GENERATION, AS_JSON, *BESIDE.values())
        self.paths = tuple(folder / name for name in names)
        self.config = Facts.read(folder / _CONFIG)
        self._id_sources = (Facts.read(folder / _GENERATION), model)

    def special_tokens(self, tokenizer: Tokenizer) -> SpecialTokens:
        """The control tokens.

        Raises:
            ModelFileError: ids are malformed or out of range.
            TokenizerError: the tokenizers library fails.
        """
        bos = self._first("bos", tokenizer)
        eos = [*self._named("eos", tokenizer), *self._listed("eos")]
        eos += [id_ for text in END_OF_GENERATION if (id_ := tokenizer.special_id(text)) is not None]
        add_bos = bos is not None and self.config.boolean(
            "add_bos_token", default=self._begins_with(bos, tokenizer)
        )
        return SpecialTokens(
            bos=bos, eos=tuple(dict.fromkeys(eos)), add_bos=add_bos, pad=self._first("pad", tokenizer)
        )

    def chat_templates(self) -> dict[str, str]:
        """Jinja source by name, of the first place that has any; ModelFileError where one is not a text."""
        found: dict[str, object] = {
            name: read_text(self._folder / file, ModelFileError, "Download or copy it again")
            for name, file in BESIDE.items()
            if (self._folder / file).is_file()
        }
        if DEFAULT not in found:
            for facts in (self.config, Facts.read(self._folder / AS_JSON)):
                value = facts.value("chat_template")
                if isinstance(value, list):  # several by name
                    objects = [entry for entry in value if isinstance(entry, dict)]
                    value = {str(entry.get("name")): entry.get("template") for entry in objects}
                if value is not None:
                    stated = value if isinstance(value, dict) else {DEFAULT: value}
                    return templates(stated | found, facts.where)
        return templates(found, str(self._folder))

    def _first(self, role: str, tokenizer: Tokenizer) -> int | None:
        return next(iter((*self._named(role, tokenizer), *self._listed(role))), None)

    def _named(self, role: str, tokenizer: Tokenizer) -> Iterator[int]:
        """The token that ``tokenizer_config.json`` gives as text, alone or in an object."""
        value = self.config.value(f"{role}_token")
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

    def _begins_with(self, bos: int, tokenizer: Tokenizer) -> bool:
        try:
            return tokenizer.begins_with(bos)
        except TokenizerError as error:
            raise TokenizerError(f"{self._folder}: {error}") from error
