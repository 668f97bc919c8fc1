"""The tokenizer, special tokens and chat template of a Hugging Face directory.

Generation ends at the tokens that ``tokenizer_config.json``, ``special_tokens_map.json``,
``generation_config.json`` and the model's configuration name, and at well-known control tokens, as with GGUF
files.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from edgespec_models.errors import EdgespecError, ModelFileError, TokenizerError
from edgespec_models.files.facts import Facts
from edgespec_models.files.impostors import refuse_impostor
from edgespec_models.schema import read_text, shown
from edgespec_models.text.encoder import Encoder
from edgespec_models.text.template_files import AS_JSON, BESIDE, DEFAULT, templates
from edgespec_models.text.tokenizer import SpecialTokens, Tokenizer

END_OF_GENERATION = (
    *("<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>"),
    *("<|call|>", "<|calls|>", "<|flush|>", "<end_of_turn>", "<turn|>", "<|tool_response>", "<eos>", "</s>"),
    *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "<|observation|>"),
)
"""Texts of control tokens that end generation."""

_CONFIG, _GENERATION = "tokenizer_config.json", "generation_config.json"
_MAP, _ADDED = "special_tokens_map.json", "added_tokens.json"
_BAD_WORDS = "bad_words_ids"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_BEGINS = ("<|im_start|>", "<start_of_turn>", "<|start_header_id|>", "<|end_header_id|>", "<|turn>")
_KNOWN = frozenset(END_OF_GENERATION) - {"</s>"}  # a tag of HTML, where a file does not say otherwise
# Tags of thoughts are text.
_MARK = re.compile(r"<(?!/?(?:\w+:)?think>)[^<>\s]+>|\[(?!/?THINK\])[^\[\]\s]+\]")
_OPENING = re.compile(rf"(?:\s*(?:{_MARK.pattern})\w*)*")
_TURNS = [{"role": role, "content": "probe1234"} for role in ("system", "user", "assistant", "user")]
_LOG = logging.getLogger("edgespec")


def control_texts(sources: Mapping[str, str]) -> frozenset[str]:
    """Texts that are control tokens in every file: known marks of turns, and marks in its templates."""
    return _KNOWN.union(_BEGINS, written_marks(sources))


class TokenizerFiles:
    """The files beside a directory's tokenizer; ModelFileError if one of them is damaged.

    ``model`` is the model's configuration, for ``bos_token_id`` and the like. The tokenizer may have fewer
    tokens than ``vocab_size``, the rows of the LM head.
    """

    def __init__(self, folder: Path, model: Facts, vocab_size: int) -> None:
        self._folder, self._vocab_size = folder, vocab_size
        names = (_CONFIG, _MAP, _ADDED, _GENERATION, AS_JSON, *BESIDE.values())
        self.paths = tuple(folder / name for name in names)
        self.config = self._roles = Facts.read(folder / _CONFIG)
        self.generation = Facts.read(folder / _GENERATION)
        self._id_sources = (self.generation, model)
        self._is_old = self.config.value("added_tokens_decoder") is None
        if self._is_old:  # older files count, as in transformers
            config = {key: self.config.value(key) for key in self.config.keys}
            self._roles = Facts.read(folder / _MAP).over(config)

    def complete(self, text: str) -> tuple[str, Tokenizer]:
        """The text of a ``tokenizer.json``, completed from the files beside it, and its tokenizer.

        Tokens at the beginning or end of a text or a turn become control tokens. Added tokens without a row
        in the LM head are left out. Raises ModelFileError for damaged files, TokenizerError for a
        ``tokenizer.json`` that cannot be read, or a necessary token without a row.
        """
        refuse_impostor(self._folder / "tokenizer.json")
        encoder, spec, name = Encoder(text), json.loads(text), self._folder.name
        listed = spec.get("added_tokens") or []
        spec["added_tokens"] = added = self._added(listed, encoder.vocabulary())
        if added != listed:
            encoder = Encoder(text := _dumped(spec))
        ids = {content: id_ for id_, (content, _) in encoder.added_tokens().items()}
        moved = [token for token in added if ids.get(token["content"], token["id"]) != token["id"]]
        if moved:
            first, id_ = moved[0]["content"], moved[0]["id"]
            _LOG.warning("%s: added tokens are numbered anew: %r is %d, not %d", name, first, ids[first], id_)
        absent = {content for content, id_ in ids.items() if id_ >= self._vocab_size}
        if absent:
            marks = {*self._texts("bos"), *self._texts("eos"), *written_marks(self.chat_templates())}
            for needed in sorted(marks & absent):
                raise TokenizerError(
                    f"The LM head has {self._vocab_size} rows, none for {needed!r}, which texts or turns "
                    "need. Use the tokenizer that belongs to the model."
                )
            texts = shown(sorted(absent))
            _LOG.warning("%s: tokens without a row in the LM head are left out: %s", name, texts)
            spec["added_tokens"] = [token for token in added if token["content"] not in absent]
            vocabulary = spec["model"]["vocab"]
            if isinstance(vocabulary, dict):  # of a Unigram model, a list without added tokens
                spec["model"]["vocab"] = {t: id_ for t, id_ in vocabulary.items() if t not in absent}
            encoder = Encoder(text := _dumped(spec))
        if "[INST]" in ids and "p{N}{1,3}" in json.dumps(spec.get("pre_tokenizer")):
            _LOG.warning(
                "%s: tokenizer.json has the known wrong regular expression of Mistral models: some words and "
                "numbers become other tokens than in training. Use a GGUF file.",
                name,
            )
        return text, Tokenizer(encoder, vocab_size=self._vocab_size)

    def special_tokens(self, tokenizer: Tokenizer) -> SpecialTokens:
        """The control tokens; ids without a token are left out with a warning.

        Raises:
            ModelFileError: ids are malformed.
            TokenizerError: the tokenizers library fails.
        """
        bos = next(iter([*self._named("bos", tokenizer), *self._ids("bos_token_id")]), None)
        eos = [*self._named("eos", tokenizer), *self._ids("eos_token_id")]
        eos += ends_of_generation(tokenizer.special_id)
        add_bos = bos is not None and self.config.boolean(
            "add_bos_token", default=self._begins_with(bos, tokenizer)
        )
        words = dict.fromkeys(self._words(_BAD_WORDS))
        return SpecialTokens(
            bos=bos,
            eos=tuple(dict.fromkeys(eos)),
            add_bos=add_bos,
            suppressed=self._ids("suppress_tokens"),
            suppressed_first=self._ids("begin_suppress_tokens"),
            bad_words=tuple(word for word in words if word not in {(end,) for end in eos}),
        )

    def chat_templates(self) -> dict[str, str]:
        """Jinja source by name, from the first place with any; ModelFileError if a source is no text."""
        content: dict[str, object] = {
            name: read_text(self._folder / file, ModelFileError, "Download or copy it again")
            for name, file in BESIDE.items()
            if (self._folder / file).is_file()
        }
        if DEFAULT not in content:
            for facts in (self.config, Facts.read(self._folder / AS_JSON)):
                value = facts.value("chat_template")
                if isinstance(value, list):  # several by name
                    objects = [entry for entry in value if isinstance(entry, dict)]
                    value = {str(entry.get("name")): entry.get("template") for entry in objects}
                if value is not None:
                    stated = value if isinstance(value, dict) else {DEFAULT: value}
                    return templates(stated | content, facts.where)
        return templates(content, str(self._folder))

    def _added(self, listed: list[dict[str, Any]], own: dict[str, int]) -> list[dict[str, Any]]:
        """The added tokens ``listed`` in ``tokenizer.json`` and in files beside it.

        ``own`` are the model's.
        """
        added = {token["content"]: dict(token) for token in listed}
        for token in self._beside():
            text = token["content"]
            kept = added.setdefault(text, token | {"id": own.get(text, token["id"])})
            kept["special"] = kept["special"] or token["special"]
        named = {*self._texts("bos"), *self._texts("eos")}
        for text in sorted((named | _KNOWN) & own.keys()):
            if len(text) > 1:  # else texts could not be spelled without it
                added.setdefault(text, added_token(own[text], text))
        for text in (named | control_texts(self.chat_templates())) & added.keys():
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
            tokens.append(added_token(int(key), entry.text("content")) | flags)
        if self._is_old:
            older = Facts.read(self._folder / _ADDED)
            tokens = [added_token(older.integer(text), text) for text in older.keys]
        return sorted(tokens, key=lambda token: int(token["id"]))

    def _texts(self, role: str) -> list[str]:
        """The text of the token with a role, or nothing."""
        value = self._roles.value(f"{role}_token")
        text = value.get("content") if isinstance(value, dict) else value
        return [text] if isinstance(text, str) else []

    def _named(self, role: str, tokenizer: Tokenizer) -> Iterator[int]:
        """The token with a role in a file that gives its text."""
        for text in self._texts(role):
            id_ = tokenizer.special_id(text)
            id_ = tokenizer.id_of_bytes(text.encode("utf-8", "surrogatepass")) if id_ is None else id_
            yield from () if id_ is None else (id_,)

    def _words(self, key: str) -> Iterator[tuple[int, ...]]:
        """Sequences of ids in the configurations of generation and model; a number is a sequence of one."""
        for facts in self._id_sources:
            value: Any = facts.value(key)
            for item in value if isinstance(value, list) else [] if value is None else [value]:
                nests = isinstance(item, list) and key == _BAD_WORDS
                word: list[Any] = item if nests else [item]
                if not word or any(type(id_) is not int for id_ in word):
                    allowed = "lists of ids" if key == _BAD_WORDS else "ids"
                    raise ModelFileError(f"{facts.where}: {key} has {item!r}; allowed: {allowed}")
                if all(0 <= id_ < self._vocab_size for id_ in word):
                    yield tuple(word)
                elif key.endswith("_token_id"):  # others name tokens of larger vocabularies
                    _LOG.warning("%s: no token has the %s %d", facts.where, key, word[0])

    def _ids(self, key: str) -> tuple[int, ...]:
        return tuple(dict.fromkeys(id_ for word in self._words(key) for id_ in word))

    def _begins_with(self, bos: int, tokenizer: Tokenizer) -> bool:
        try:
            return tokenizer.begins_with(bos)
        except TokenizerError as error:
            raise TokenizerError(f"{self._folder}: {error}") from error


def added_token(id_: int, text: str) -> dict[str, Any]:
    """An added token of a ``tokenizer.json``, which is not special."""
    return {"id": id_, "content": text, **dict.fromkeys(_FLAGS, False)}


def _dumped(spec: dict[str, Any]) -> str:
    return json.dumps(spec, ensure_ascii=False, separators=(",", ":"))


def ends_of_generation(id_of: Callable[[str], int | None]) -> list[int]:
    """The control tokens that end generation, without tokens that end one message of several."""
    ids = {text: id_ for text in END_OF_GENERATION if (id_ := id_of(text)) is not None}
    if "<|return|>" in ids and id_of("<|channel|>") is not None:
        ids.pop("<|end|>", None)
    return [*ids.values()]


def written_marks(sources: Mapping[str, str]) -> set[str]:
    """The marks that chat templates write around turns, of a conversation in which no tools are called.

    They stand at the beginning of a conversation and behind its first content. Brackets in a default prompt
    between the two are text.
    """
    marks = set[str]()
    for source in sources.values():
        from edgespec_models.text.chat_template import ChatTemplate  # and Jinja, which texts do without

        for turns in (_TURNS[1:], _TURNS):
            with suppress(EdgespecError):  # a template that is damaged, or knows no system
                before, _, behind = ChatTemplate(source).render(turns).partition(turns[0]["content"])
                opening = _OPENING.match(before)
                marks.update(_MARK.findall(f"{opening[0] if opening else ''} {behind}"))
    return marks
