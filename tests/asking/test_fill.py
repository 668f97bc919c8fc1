"""Filling in the middle: each model's form, cuts that a keystroke leaves alone, and where a fill ends."""

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.answering.fill_reading import FillReader
from edgespec.asking.fill import fill_tokens
from edgespec.asking.request import Hole, Request
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import RequestError
from edgespec_models.text.tokenizer import SpecialTokens, Tokenizer
from tests.kit.models import toy_bundle, toy_model
from tests.kit.tokenizers import byte_level_json, sentencepiece_json
from tests.kit.toy import F32, NextLogits, ToySession, script_logits

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
GEMMA = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_separator|>")
STARCODER2 = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>", "<repo_name>", "<file_sep>")
GRANITE = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>", "<reponame>", "<filename>")
DEEPSEEK = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")
CODESTRAL = ("[PREFIX]", "[SUFFIX]", "[MIDDLE]")
FAR = "".join(f"x{at} = {at}\n" for at in range(32))
TEXTS = st.text(st.sampled_from("ab \n=é😀<|>"), max_size=120) | st.sampled_from([*QWEN, *CODESTRAL])


def with_marks(names: tuple[str, ...], *, special: bool = True) -> Tokenizer:
    spec: dict[str, Any] = json.loads(byte_level_json())
    first, model = len(spec["model"]["vocab"]) + 10, spec["added_tokens"][0]
    more = ({**model, "id": first + at, "content": name, "special": special} for at, name in enumerate(names))
    spec["added_tokens"] += more
    return Tokenizer.from_json(json.dumps(spec), vocab_size=500)


def bundle_of(tokenizer: Tokenizer, *, bos: bool = False) -> Bundle:
    bundle = toy_bundle("toy", 4096)
    bundle.tokenizer = tokenizer
    begins = tokenizer.special_id("<|im_start|>")
    bundle.manifest.special_tokens = SpecialTokens(begins, (), add_bos=bos)  # type: ignore[misc]
    return bundle


def read(names: tuple[str, ...], *around: Any, longest: int = 4096, bos: bool = False, new: int = 64) -> str:
    bundle = bundle_of(with_marks(names), bos=bos)
    tokens, hole = fill_tokens(bundle, Hole(*around), Request(max_new_tokens=new), longest)
    return f"{bundle.tokenizer.decode(tokens, skip_special=False)}{hole.held.decode()}"


@pytest.mark.parametrize("names", [QWEN, GEMMA, STARCODER2, GRANITE, DEEPSEEK], ids=lambda names: names[0])
def test_the_lines_before_the_cursor_begin_the_middle(names: tuple[str, ...]) -> None:
    prefix, suffix, middle = names[:3]
    for line in ("", "    ", "    z = fo"):
        told = read(names, f"{FAR}y = 1\n{line}", "\nprint(y)\n", bos=True)
        assert told == f"<|im_start|>{prefix}{FAR}{suffix}\nprint(y)\n{middle}y = 1\n{line}"


@pytest.mark.parametrize(
    ("line", "held"),
    [
        ("", ""),
        ("    ", " "),
        ("x = ", " "),
        ("x = foo", "foo"),
        ("x.", "."),
        ("ab1", "1"),
        ("z" * 99, "z" * 16),
    ],
)
def test_the_end_of_a_begun_line_is_written_again(line: str, held: str) -> None:
    bundle = bundle_of(with_marks(QWEN))
    tokens, hole = fill_tokens(bundle, Hole(f"a\n{line}", "b"), Request(), 4096)
    assert hole.held.decode().endswith(held) and hole.line.endswith(hole.held.decode().lstrip("\n"))
    assert len(hole.held) <= max(len(held), 4)
    assert bundle.tokenizer.bytes_of(tokens).endswith(line.encode()[: len(line) - len(hole.held)])


def test_codestral_reads_the_suffix_first() -> None:
    assert read(CODESTRAL, f"{FAR}y = ", "\nprint(y)\n") == f"[SUFFIX]\nprint(y)\n[PREFIX]{FAR}y = "


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (QWEN, "<|repo_name|>repository\n<|file_sep|>a.py\nA\n<|file_sep|>b.py\nB\n<|file_sep|>file\n"),
        (STARCODER2, "<repo_name>repository\n<file_sep>a.py\nA\n<file_sep>b.py\nB\n<file_sep>file\n"),
        (GEMMA, "<|file_separator|>a.py\nA\n<|file_separator|>b.py\nB\n<|file_separator|>file\n"),
        (DEEPSEEK, "# a.py\nA\n\n# b.py\nB\n\n"),
    ],
    ids=["qwen", "starcoder2", "codegemma", "deepseek"],
)
def test_other_files_come_first_in_the_models_form(names: tuple[str, ...], wanted: str) -> None:
    prefix, suffix, middle = names[:3]
    files = (("a.py", "A"), ("b.py", "B"))
    assert read(names, "p", "s", files) == f"{wanted}{prefix}{suffix}s{middle}p"
    assert "[PREFIX]# a.py\nA\n\n# b.py\nB\n\np" in read(CODESTRAL, "p", "s", files)


def test_the_nearest_files_are_kept_whole() -> None:
    files = tuple((f"{at}.py", "ab" * 20) for at in range(9))
    prompt = read(QWEN, "p", "s", files, longest=300)
    assert "8.py" in prompt and "0.py" not in prompt and prompt.count("ab" * 20) == prompt.count(".py\n")


@pytest.mark.parametrize("names", [QWEN, GEMMA, STARCODER2, GRANITE, DEEPSEEK, CODESTRAL])
def test_tokenizers_that_do_not_say_so_have_control_tokens_too(names: tuple[str, ...]) -> None:
    tokenizer = with_marks(names, special=False)
    assert all(tokenizer.special_id(name) is not None for name in names)
    assert not any(map(tokenizer.is_special, tokenizer.encode("".join(names))))


@pytest.mark.parametrize("special", [True, False])
def test_marks_in_a_text_stay_text(special: bool) -> None:
    tokenizer = with_marks(QWEN, special=special)
    text = "".join(QWEN) + "<|im_end|>"
    tokens, hole = fill_tokens(bundle_of(tokenizer), Hole(text, text, ((text, text),)), Request(), 4096)
    marks = [id_ for id_ in tokens if tokenizer.is_special(id_)]
    spelled = [tokenizer.decode([id_], skip_special=False) for id_ in marks]
    assert spelled == ["<|repo_name|>", "<|file_sep|>", "<|file_sep|>", *QWEN[:3]]
    assert hole.ends == {tokenizer.special_id(name) for name in QWEN}


def test_no_space_is_put_before_a_part() -> None:
    spec: dict[str, Any] = json.loads(sentencepiece_json(prefix=True))
    first = max(spec["model"]["vocab"].values()) + 10
    more = (
        {**spec["added_tokens"][0], "id": first + at, "content": each} for at, each in enumerate(CODESTRAL)
    )
    spec["added_tokens"] += more
    tokenizer = Tokenizer.from_json(json.dumps(spec))
    tokens, hole = fill_tokens(bundle_of(tokenizer), Hole("add", "fox"), Request(), 400)
    assert tokenizer.decode(tokens, skip_special=False) + hole.held.decode() == "[SUFFIX]fox[PREFIX]add"


def test_a_model_without_marks_names_one_that_has_them() -> None:
    with (
        toy_model() as model,
        pytest.raises(RequestError, match=r"toy has no .*qwen2\.5-coder"),
    ):
        model.fill("a", "b")


@given(TEXTS, TEXTS, st.lists(st.tuples(TEXTS, TEXTS), max_size=3), st.integers(16, 300), st.integers(1, 400))
def test_what_is_read_fits_and_what_is_near_is_kept(
    prefix: str, suffix: str, files: list[tuple[str, str]], longest: int, new: int
) -> None:
    for names in (QWEN, CODESTRAL):
        tokenizer = with_marks(names)
        hole = Hole(prefix, suffix, tuple(files))
        request = Request(max_new_tokens=new)
        tokens, hole = fill_tokens(bundle_of(tokenizer, bos=True), hole, request, longest)
        assert len(tokens) <= longest - min(new, longest // 2)
        marks = [tokenizer.special_id(name) for name in names]
        before, behind = (tokens.index(cast(int, marks[at])) for at in (0, 1))
        if names is QWEN:
            middle = tokens.index(cast(int, marks[2]))
            left, right = [*tokens[before + 1 : behind], *tokens[middle + 1 :]], tokens[behind + 1 : middle]
            assert prefix.encode().endswith(tokenizer.bytes_of(left) + hole.held)
        else:
            right = tokens[behind + 1 : before]
        assert suffix.encode().startswith(tokenizer.bytes_of(right))
        assert sum(map(tokenizer.is_special, tokens)) <= 4 + len(files) + 2


@pytest.mark.parametrize("longest", [4096, 400])
@pytest.mark.parametrize("names", [QWEN, CODESTRAL])
def test_a_typed_line_leaves_what_was_read_as_it_is(names: tuple[str, ...], longest: int) -> None:
    bundle, request, suffix = bundle_of(with_marks(names)), Request(max_new_tokens=64), "end\n" * 20
    text, reread = "", 0
    last, _ = fill_tokens(bundle, Hole(FAR * 4, suffix), request, longest)
    for at in range(64):
        text += f"line {at} of it\n"
        now, _ = fill_tokens(bundle, Hole(FAR * 4 + text, suffix), request, longest)
        reread += now[: len(last) - 2] != last[:-2]
        last = now
    assert reread <= (2 if longest == 4096 and names is QWEN else 0 if longest == 4096 else 32)


def fills(
    prefix: str, suffix: str, writes: str, *, files: Any = (), max_lines: int | None = None, **options: Any
) -> str:
    """What a model shows that writes a text behind the prompt."""
    tokenizer = with_marks(QWEN)
    bundle = bundle_of(tokenizer)
    tokens, hole = fill_tokens(bundle, Hole(prefix, suffix, tuple(files)), Request(max_new_tokens=80), 4096)
    logits = ending(tokenizer, hole.held.decode() + writes, len(tokens))
    with toy_model(ToySession(logits, 500, context=4096), bundle=lambda *_: bundle) as model:
        options = {"max_new_tokens": 80, "extra": files, "max_lines": max_lines, **options}
        stream = model.stream_fill(prefix, suffix, **options)
        streamed = "".join(stream)
        whole = model.fill(prefix, suffix, **options)
        assert whole.finish_reason == "stop" and whole.text == streamed
        assert asyncio.run(model.fill_async(prefix, suffix, **options)).text == streamed
        return streamed


def ending(tokenizer: Tokenizer, writes: str, start: int) -> NextLogits:
    """The model that writes a text and then a mark, which ends it."""
    script, end = script_logits(tokenizer, f"{writes}¤".encode(), start), tokenizer.special_id("<|file_sep|>")

    def next_logits(tokens: Any) -> Any:
        logits = script(tokens)
        if tokenizer.bytes_of(tokens[start:]).decode(errors="replace").endswith(writes):
            logits[end] = 99.0
        return logits

    return next_logits


@pytest.mark.parametrize(
    ("prefix", "suffix", "writes", "shown"),
    [
        ("a = ", "\nprint(a)\n", "1\nprint(a)\nmore", "1"),
        ("a = ", "\nprint(a)\n", "1\nprint(a)", "1"),
        ("a = ", "\nprint(a)\n", "1\nprint(a, b)\n", "1\nprint(a, b)\n"),
        ("a = ", "\n\n  x\n", "1\n\n  x\nmore", "1"),
        ("a = ", "\n\n  x\n", "1\n  x\nmore", "1"),
        ("a = ", "\n\n  x\n", "1\n    x\n  x ", "1\n    x"),
        ("if a:\n", "    b\n", "    c\n    d\n    b\n", "    c\n    d\n"),
        ("if a:\n", "    b\n", "    b\n", ""),
        ("f(", ")\nx\n", "1, 2\nmore\n", "1, 2"),
        ("f(", ")\nx\n", "1)\nmore\n", "1"),
        ("f(", ")\nx\n", "1) ", "1"),
        ("x = [\n  [", "]\n]\n", "1, 2]\nmore", "1, 2"),
        ("f(", ");\n", "a[1]);\n", "a[1]"),
        ("f(", ");\n", "a[1])\n", "a[1]"),
        ("f(g(", "))\n", "a))\n", "a"),
        ("f(", ")\n", "1) + g(2)\n", "1) + g(2"),
        ('f("', '")\n', 'a(")\n', "a("),
        ('  """', '"""\n', 'Says it."""\n', "Says it."),
        ("{\n  if (a) {", "}\n}\n", "b; }\n", "b; "),
        ('p = "C:\\\\', '"\n', 'dir\\\\"\n', "dir\\\\"),
        # which have partners
        ("f(", ")\nx\n", "g(1)\nmore\n", "g(1)"),
        ("f(g(", ")\n", "1)\n", "1)"),
        ("f(", ")\n", "1) + g(2\n", "1) + g(2"),
        ("x = (\n  f(b", ")\n", ", c)\n", ", c)"),
        ("f(", ") + 1\n", "x + 1\n", "x + 1"),
        ("f(", ")\n", "':)\n", "':)"),
        ("it's f(", ")\n", "1)\n", "1)"),
        ("  ", "x\n", "y \nmore", "y "),
        ("if a:\n    ", "\nb\n", "c\n    d\nb\n", "c\n    d"),
        ("if a:\n    ", "\nb\n", "  c\nb\n", "  c"),
        ("if a:\n    ", "\n    b\n", "b\nmore", ""),
        ("if a:\n    ", "\nb\n", "\n    c\nb\n", "\n    c"),
        ("x = the_qu", "\nb\n", "ick\nb\n", "ick"),
        ("a", "", "bc\nd", "bc\nd"),
        ("a\n", "  \n\n", "bc\n\nd", "bc\n\nd"),
        ("a = ", "\nb\n", "bb\nc", "bb\nc"),
        ("a = ", "\nb\n", "b\nc\n", "b\nc\n"),
    ],
)
def test_a_fill_ends_before_what_the_suffix_goes_on_with(
    prefix: str, suffix: str, writes: str, shown: str
) -> None:
    assert fills(prefix, suffix, writes) == shown


def test_a_fill_has_so_many_lines() -> None:
    assert fills("a = ", "\nprint(a)\n", "1\nb\nc\n", max_lines=2) == "1\nb"
    assert fills("if a:\n", "print(a)\n", "1\nb\nc\n", max_lines=2) == "1\nb\n"
    assert fills("a", "\n", "1\n\n\nc\n", max_lines=1) == "1"
    assert fills("a = ", "\nb\n", "1\nxstop\nc\n", max_lines=9, stop="stop") == "1\nx"
    with toy_model() as model, pytest.raises(RequestError, match="max_lines is 0; allowed"):
        model.fill("a", "b", max_lines=0)


@given(st.text(st.sampled_from("a) \n"), max_size=30), st.text(st.sampled_from("a) \n"), max_size=12))
def test_pieces_are_what_the_whole_is(writes: str, suffix: str) -> None:
    for prefix in ("a", "a\n", "a\n  ", "f(a"):
        for most in (None, 2):
            hole = Hole(prefix, suffix)
            one, many = FillReader(hole, most), FillReader(hole, most)
            pieces = "".join(many.push(write) for write in writes) + many.push("", final=True)
            assert pieces == one.push(writes, final=True)
            assert pieces in writes


class Timed(ToySession):
    """Its passes take a second of a clock that it moves itself."""

    def __init__(self, logits: NextLogits, clock: list[float]) -> None:
        super().__init__(logits, 500, context=4096)
        self._clock = clock

    def forward(self, tokens: Sequence[int]) -> F32:
        self._clock[0] += 1.0
        return super().forward(tokens)


def test_what_other_files_and_the_suffix_say_is_drafted() -> None:
    tokenizer = with_marks(QWEN)
    bundle, request = bundle_of(tokenizer), Request(max_new_tokens=40)
    clock = [0.0]
    line = "return the_quick_brown_fox(jumps, over, lazy)"
    for hole in (Hole("x\n", f"\n\n{line} + 1\n"), Hole("x\n", "", (("a.py", f"{line} + 1"),))):
        start = len(fill_tokens(bundle, hole, request, 4096)[0])
        logits = ending(tokenizer, line, start)
        with toy_model(Timed(logits, clock), clock=lambda: clock[0], bundle=lambda *_: bundle) as model:
            answer = model.fill(hole.prefix, hole.suffix, extra=hole.extra, max_new_tokens=40)
            assert answer.text == line and answer.stats.by_source["ngram"].accepted > 5


def test_the_first_round_is_drafted_with_what_was_taken_back() -> None:
    tokenizer, clock = with_marks(QWEN), [0.0]
    bundle = bundle_of(tokenizer)
    prefix, suffix = "return the_quick_brown_fox(jumps)\nreturn the_qui", "\n"
    read, hole = fill_tokens(bundle, Hole(prefix, suffix), Request(), 4096)
    session = Timed(ending(tokenizer, "quick_brown_fox(jumps)", len(read)), clock)
    with toy_model(session, clock=lambda: clock[0], bundle=lambda *_: bundle) as model:
        model.fill(prefix, suffix, max_new_tokens=0)  # as an editor warms the cache
        records = list(model.stream_fill(prefix, suffix, max_new_tokens=20).records())
    assert hole.held == b"qui" and "".join(record.text for record in records) == "ck_brown_fox(jumps)"
    assert [token.source for token in records[0].tokens][:1] == ["ngram"]


def test_what_a_fill_cannot_take_is_refused() -> None:
    bundle = bundle_of(with_marks(QWEN))
    with toy_model(bundle=lambda *_: bundle) as model:
        with pytest.raises(RequestError, match=r"suffix is .*allowed: a text without lone surrogates"):
            model.fill("a", "b\ud800")
        with pytest.raises(RequestError, match="max_lines is for fills"):
            model.generate("a", max_lines=2)
    with pytest.raises(RequestError, match="use chat"):
        fill_tokens(bundle, Hole("a", "b"), Request(thinking=True), 400)


@pytest.mark.parametrize("line", ["x = the_qui", "    ", "f(", "é😀"])
def test_drafts_leave_a_healed_fill_as_it_is(line: str) -> None:
    tokenizer = with_marks(QWEN)
    bundle = bundle_of(tokenizer)
    _, hole = fill_tokens(bundle, Hole(line, "\n"), Request(), 4096)

    def periodic(tokens: Sequence[int]) -> F32:
        return np.random.default_rng(tokens[-1] % 5).normal(size=500).astype(np.float32)

    clock = [0.0]
    with toy_model(Timed(periodic, clock), clock=lambda: clock[0], bundle=lambda *_: bundle) as model:
        fill = partial(model.fill, line, "\n", max_tokens=60)
        drafts, plain, scored = fill(), fill(speculate=False), fill(prompt_logprobs=True)
    assert (
        drafts.tokens == plain.tokens == scored.tokens
        and drafts.text == plain.text
        and drafts.stats.accepted > 5
    )
    written = tokenizer.bytes_of(token for token in plain.tokens if not tokenizer.is_special(token))
    assert hole.held and written.startswith(hole.held)
    assert plain.text == written.removeprefix(hole.held).decode(errors="replace")


def test_a_stop_string_in_what_is_written_again_ends_nothing() -> None:
    assert fills("f(x)", "\n", " + f(y)\n", stop=")") == " + f(y"


def test_spellings_are_those_that_go_on_or_begin() -> None:
    tokenizer = with_marks(QWEN)
    for data in (b"th", b"qu", b" ", b"\n", "é".encode()[:1]):
        wanted = {
            id_
            for id_ in range(tokenizer.vocab_size)
            if (each := tokenizer.token_bytes(id_)) and (each.startswith(data) or data.startswith(each))
        }
        spelled = set(tokenizer.spelling(data))
        assert {tokenizer.token_bytes(id_) for id_ in spelled} == {
            tokenizer.token_bytes(id_) for id_ in wanted if not tokenizer.is_special(id_)
        }
