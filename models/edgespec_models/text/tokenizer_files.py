"""The tokenizer, special tokens and chat template of a Hugging Face directory.

What ends generation: the tokens that ``tokenizer_config.json``, ``special_tokens_map.json``,
``generation_config.json`` and the model's configuration name, and the well-known ones among the control
tokens, as with GGUF files.
"""

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgespec_models.errors import EdgespecError, ModelFileError, TokenizerError
from edgespec_models.files.facts import Facts
from edgespec_models.schema import read_text
from edgespec_models.text.encoder import Encoder
from edgespec_models.text.tokenizer import SpecialTokens, Tokenizer

END_OF_GENERATION = (
    *("<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>"),
    *("<|call|>", "<|calls|>", "<|flush|>", "<end_of_turn>", "<turn|>", "<|tool_response>", "<eos>", "</s>"),
    *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>", "<｜end▁of▁sentence｜>"),
)
"""Tokens that end generation in the models that have them as control tokens."""

_CONFIG, _GENERATION, _TEMPLATE = "tokenizer_config.json", "generation_config.json", "chat_template.jinja"
_MAP, _ADDED = "special_tokens_map.json", "added_tokens.json"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_HTML = "</s>"  # a control token only where the file says so: to Gemma it is a tag of HTML
_MARK = re.compile(r"<(?!/?(?:\w+:)?think>)[^<>\s]+>|\[(?!/?THINK\])[^\[\]\s]+\]")
_TURNS = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
_LOG = logging.getLogger("edgespec")


def written_marks(template: str | None) -> frozenset[str]:
    """What a chat template writes around a plain conversation; tags of thoughts and of tools are no marks."""
    from edgespec_models.text.chat_template import ChatTemplate  # and Jinja, which texts do without

    try:
        return frozenset(_MARK.findall(ChatTemplate(template).render(_TURNS) if template else ""))
    except EdgespecError:  # a template that wants other conversations, or is damaged
        return frozenset()


def control_texts(template: str | None) -> frozenset[str]:
    """Texts of control tokens, whatever a file says of them: marks of the template, known ends of turns."""
    return written_marks(template) | {*END_OF_GENERATION} - {_HTML}


class TokenizerFiles:
    """What a directory says beside its tokenizer; ModelFileError where one of the files is damaged.

    ``model`` is the model's configuration, for ``bos_token_id`` and the like. The tokenizer may have fewer
    tokens than ``vocab_size``, the rows of the LM head.
    """

    def __init__(self, folder: Path, model: Facts, vocab_size: int) -> None:
        self._folder, self._vocab_size = folder, vocab_size
        self.paths = tuple(folder / name for name in (_CONFIG, _MAP, _ADDED, _GENERATION, _TEMPLATE))
        self.config = self._roles = Facts.read(folder / _CONFIG)
        self._id_sources = (Facts.read(folder / _GENERATION), model)
        self._is_old = self.config.value("added_tokens_decoder") is None
        if self._is_old:  # older files count, as in transformers
            config = {key: self.config.value(key) for key in self.config.keys}
            self._roles = Facts.read(folder / _MAP).over(config)

    def complete(self, text: str) -> tuple[str, Tokenizer]:
        """The text of a ``tokenizer.json`` together with what stands beside it, and its tokenizer.

        Tokens that stand only in other files are added, and what begins or ends a text or a turn becomes a
        control token. Added tokens without a row in the LM head are left out.

        Raises:
            ModelFileError: a file beside it is damaged.
            TokenizerError: it is damaged or of an unknown kind; or the LM head lacks a row for an ordinary
                token, or for a control token that texts or turns need.
        """
        encoder, spec = Encoder(text), json.loads(text)
        listed: list[dict[str, Any]] = spec.setdefault("added_tokens", [])
        spec["added_tokens"] = self._added(listed, encoder.vocabulary())
        if spec["added_tokens"] != listed:
            encoder = Encoder(text := _dumped(spec))
        ids = {token: id_ for id_, (token, _) in encoder.added_tokens().items()}
        absent = sorted(token for token, id_ in ids.items() if id_ >= self._vocab_size)
        if absent:
            self._check_unneeded(absent)
            _leave_out(spec, absent)
            encoder = Encoder(text := _dumped(spec))
        if "[INST]" in ids and "p{N}{1,3}" in json.dumps(spec.get("pre_tokenizer")):
            _LOG.warning(
                "%s: tokenizer.json cuts texts as Llama 3 does, a known mistake in files of Mistral models: "
                "some words and numbers become other tokens than the model has learned. Take a newer "
                "tokenizer.json, or a GGUF file of the model.",
                self._folder.name,
            )
        _warn_of_numbers(self._folder, {each["content"]: each["id"] for each in spec["added_tokens"]}, ids)
        return text, Tokenizer(encoder, vocab_size=self._vocab_size)

    def special_tokens(self, tokenizer: Tokenizer) -> SpecialTokens:
        """The control tokens; ids that no token has are said and left out.

        Raises:
            ModelFileError: ids are malformed.
            TokenizerError: the tokenizers library fails.
        """
        bos = next(iter([*self._named("bos", tokenizer), *self._listed("bos")]), None)
        eos = [*self._named("eos", tokenizer), *self._listed("eos")]
        eos += [id_ for text in END_OF_GENERATION if (id_ := tokenizer.special_id(text)) is not None]
        add_bos = bos is not None and self.config.boolean(
            "add_bos_token", default=self._begins_with(bos, tokenizer)
        )
        return SpecialTokens(bos=bos, eos=tuple(dict.fromkeys(eos)), add_bos=add_bos)

    def chat_template(self) -> str | None:
        """Jinja source. Raises ModelFileError where it is not a text."""
        where = self._folder / _TEMPLATE
        if where.is_file():
            return read_text(where, ModelFileError, "Download or copy it again")
        template = self.config.value("chat_template")
        if isinstance(template, list):  # several by name
            objects = (entry for entry in template if isinstance(entry, dict))
            template = next((e.get("template") for e in objects if e.get("name") == "default"), None)
        if template is None or isinstance(template, str):
            return template
        raise ModelFileError(f"{self.config.where}: chat_template is {type(template).__name__}, not a text")

    def _added(self, listed: list[dict[str, Any]], own: dict[str, int]) -> list[dict[str, Any]]:
        """The added tokens ``listed`` in ``tokenizer.json`` with those beside it; ``own`` are the model's."""
        added = {each["content"]: dict(each) for each in listed}
        for token in self._beside():
            text = token["content"]
            kept = added.setdefault(text, token | {"id": own.get(text, token["id"])})
            kept["special"] = kept["special"] or token["special"]
        control = {text for role in ("bos", "eos") for text in self._texts(role)}
        more = self._roles.value("additional_special_tokens")
        control |= {text for value in (more if isinstance(more, list) else []) for text in _text(value)}
        for text in (control | {*END_OF_GENERATION} - {_HTML}) & own.keys():
            if len(text) > 1:  # else texts could not be spelled without it
                added.setdefault(text, _entry(own[text], text))["special"] = True
        for text in (control | control_texts(self.chat_template())) & added.keys():
            added[text]["special"] = True
        return list(added.values())

    def _beside(self) -> list[dict[str, Any]]:
        """The added tokens of other files, by their ids."""
        decoder, tokens = self.config.section("added_tokens_decoder"), []
        for key in decoder.keys:
            if not key.isdecimal():
                raise ModelFileError(f"{decoder.where} has the key {key!r}, which is no id")
            entry = decoder.section(key)
            flags = {flag: entry.boolean(flag, default=False) for flag in _FLAGS}
            tokens.append(_entry(int(key), entry.text("content")) | flags)
        if self._is_old:
            older = Facts.read(self._folder / _ADDED)
            tokens = [_entry(older.integer(text), text) for text in older.keys]
        return sorted(tokens, key=lambda token: int(token["id"]))

    def _check_unneeded(self, absent: list[str]) -> None:
        """Refuse to leave out what begins or ends a text or a turn; say what else is left out."""
        marks = {*self._texts("bos"), *self._texts("eos"), *written_marks(self.chat_template())}
        needed, rows = sorted(marks.intersection(absent)), f"{self._vocab_size:,} rows"
        if needed:
            raise TokenizerError(
                f"The LM head has {rows}, none for {needed[0]!r}, which the chat template or "
                "the end of answers needs. Use the tokenizer that belongs to the model."
            )
        _LOG.warning(
            "%s: the LM head has %s; added tokens without a row are left out (%d, such as %r)",
            *(self._folder.name, rows, len(absent), absent[0]),
        )

    def _texts(self, role: str) -> list[str]:
        """The token that has a role, as its text: none or one."""
        return _text(self._roles.value(f"{role}_token"))

    def _named(self, role: str, tokenizer: Tokenizer) -> Iterator[int]:
        """The token with a role that a file gives as text."""
        for text in self._texts(role):
            id_ = tokenizer.special_id(text)
            id_ = tokenizer.id_of_bytes(text.encode()) if id_ is None else id_
            if id_ is not None:
                yield id_

    def _listed(self, role: str) -> Iterator[int]:
        """The ids that the generation's and the model's configuration give, one or a list each."""
        for facts in self._id_sources:
            value = facts.value(f"{role}_token_id")
            for id_ in value if isinstance(value, list) else [] if value is None else [value]:
                if type(id_) is not int:
                    raise ModelFileError(f"{facts.where}: {role}_token_id is {value!r}, but must be an id")
                if 0 <= id_ < self._vocab_size:
                    yield id_
                else:
                    _LOG.warning(
                        "%s: %s_token_id is %d, which no token has; it is left out", facts.where, role, id_
                    )

    def _begins_with(self, bos: int, tokenizer: Tokenizer) -> bool:
        try:
            return tokenizer.begins_with(bos)
        except TokenizerError as error:
            raise TokenizerError(f"{self._folder}: {error}") from error


def _text(value: object) -> list[str]:
    """The text of a token that a file states alone or in an object; empty without one."""
    text = value.get("content") if isinstance(value, dict) else value
    return [text] if isinstance(text, str) else []


def _entry(id_: int, text: str) -> dict[str, Any]:
    return {"id": id_, "content": text, **dict.fromkeys(_FLAGS, False)}


def _dumped(spec: dict[str, Any]) -> str:
    return json.dumps(spec, ensure_ascii=False, separators=(",", ":"))


def _leave_out(spec: dict[str, Any], absent: list[str]) -> None:
    """Take added tokens away, in place; some stand in the vocabulary too, last in that of Unigram."""
    spec["added_tokens"] = [each for each in spec["added_tokens"] if each["content"] not in absent]
    vocabulary = spec["model"]["vocab"]
    if isinstance(vocabulary, dict):
        for text in absent:
            vocabulary.pop(text, None)
    else:
        while vocabulary and vocabulary[-1][0] in absent:
            vocabulary.pop()


def _warn_of_numbers(folder: Path, stated: dict[str, int], ids: dict[str, int]) -> None:
    """Say which tokens have other ids than the files state: the library numbers without gaps."""
    moved = [text for text, id_ in stated.items() if ids.get(text, id_) != id_]
    if moved:
        _LOG.warning(
            "%s: added tokens whose ids leave gaps are numbered anew, as in transformers (%d: %r is %d, "
            "not %d)",
            *(folder.name, len(moved), moved[0], ids[moved[0]], stated[moved[0]]),
        )
