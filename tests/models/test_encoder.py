"""Where the tokenizers library fails, panics included, there is one error of edgespec's, and life goes on."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import Mock

import pytest

import edgespec
from edgespec import LoadOptions
from edgespec_models.errors import RequestError, TokenizerError
from edgespec_models.files.facts import Facts
from edgespec_models.text.encoder import Encoder
from edgespec_models.text.tokenizer import Tokenizer
from edgespec_models.text.tokenizer_files import TokenizerFiles
from tests.kit.tokenizers import byte_level_json, sentencepiece_json
from tests.kit.toy import LLAMA, tiny_bundle

BACKTRACKS = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
NO_CHUNK = {"type": "FixedLength", "length": 0}
FATAL = "a" * 40 + "!"


def _cut_by(cut: dict[str, Any], text: str) -> str:
    """``text``, a ``tokenizer.json``, with one more pre-tokenizer."""
    spec = json.loads(text)
    cuts = [cut] + ([spec["pre_tokenizer"]] if spec["pre_tokenizer"] else [])
    return json.dumps({**spec, "pre_tokenizer": {"type": "Sequence", "pretokenizers": cuts}})


@pytest.mark.parametrize("cut", [BACKTRACKS, NO_CHUNK], ids=["backtracks", "no chunk"])
def test_a_panic_is_a_tokenizer_error_whatever_is_asked(cut: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_json(_cut_by(cut, byte_level_json()))
    says = r"cannot encode the text: (Onig: .*retry-limit|chunk size must).*Try a shorter text; .* download"
    for ask in (
        lambda: tokenizer.encode(FATAL),
        lambda: tokenizer.encode(FATAL, special=True),
        lambda: tokenizer.encode_bytes(FATAL.encode()),
        lambda: tokenizer.special_spans(FATAL),
    ):
        with pytest.raises(TokenizerError, match=says):
            ask()
    if cut is BACKTRACKS:
        assert tokenizer.special_spans("x<|im_end|>") == [(1, 11, 2)]  # the next text is encoded


def test_a_template_of_no_token_is_a_tokenizer_error(tmp_path: Path) -> None:
    spec = json.loads(byte_level_json())
    template = [{"SpecialToken": {"id": "absent", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    both = {"single": template, "pair": template, "special_tokens": {}}
    text = json.dumps(spec | {"post_processor": {"type": "TemplateProcessing", **both}})
    files = TokenizerFiles(tmp_path, Facts({"bos_token_id": 1}, "config.json"), 404)
    with pytest.raises(TokenizerError, match="template: no entry found") as caught:
        files.special_tokens(Tokenizer.from_json(text))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        *((error, type(error), None) for error in (KeyboardInterrupt(), SystemExit(3), GeneratorExit())),
        (Exception("some failure"), TokenizerError, r"cannot encode the text: some failure\."),
        (MemoryError(), TokenizerError, r"cannot encode the text: not enough memory\."),
        (TypeError("why"), RequestError, "is refused: why"),
    ],
)
def test_what_the_library_raises_is_an_error_of_ours_but_ctrl_c_and_exits(
    error: BaseException, kind: type[BaseException], message: str | None
) -> None:
    encoder = Encoder(byte_level_json())
    encoder._plain = Mock(**{"encode_batch_fast.side_effect": error})
    with pytest.raises(kind, match=message) as caught:
        encoder.ids("text", special=False)
    assert (caught.value is error) == (kind is type(error))


@pytest.mark.parametrize("whose", ["target", "drafter"])
def test_a_prompt_that_panics_is_an_error_of_the_target_alone(tmp_path: Path, whose: str) -> None:
    """The drafter is left out, and the next request is answered in any case."""
    texts = {"target": byte_level_json(), "drafter": sentencepiece_json()}
    texts[whose] = _cut_by(BACKTRACKS, texts[whose])
    for name, text in texts.items():
        config = replace(LLAMA, vocab_size=Tokenizer.from_json(text).vocab_size)
        tiny_bundle(tmp_path / name, config, tokenizer_json=text)
    with edgespec.load(tmp_path / "target", tmp_path / "drafter", options=LoadOptions(threads=1)) as model:
        fails = pytest.raises(TokenizerError, match="cannot encode the text")
        with fails if whose == "target" else nullcontext():
            model.generate(FATAL, max_new_tokens=4)
        assert model.generate("the quick", max_new_tokens=4, stop_at_eos=False).tokens


def test_other_threads_run_while_a_text_is_encoded() -> None:
    """With Python's lock held all streams of a server would stand still meanwhile."""
    encoder, text = Encoder(byte_level_json()), "the quick brown fox <|im_end|> " * 40_000
    encoder.ids("a", special=True)
    gaps, over, last = list[float](), threading.Event(), perf_counter()

    def encode() -> None:
        encoder.ids(text, special=False)
        over.set()

    threading.Thread(target=encode).start()
    began = last
    while not over.wait(0.001):
        now = perf_counter()
        gaps.append(now - last)
        last = now
    assert max(gaps) < (perf_counter() - began) / 2


def test_control_tokens_are_text_or_not_in_threads_at_once() -> None:
    encoder, text = Encoder(byte_level_json()), "a<|im_end|>b" * 500
    wanted = {special: encoder.ids(text, special=special) for special in (True, False)}
    assert len(wanted[False]) > len(wanted[True])
    with ThreadPoolExecutor(8) as pool:
        futures = [
            (special, pool.submit(encoder.ids, text, special=special)) for special in (True, False) * 50
        ]
    assert all(told.result() == wanted[special] for special, told in futures)
