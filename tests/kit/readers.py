"""Readers of what strangers wrote: each with sound input, and the errors that others may meet."""

import json
import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO, TextIOWrapper
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast
from unittest.mock import patch

from rich.console import Console

from edgespec.answering.call_reading import CallReader
from edgespec.asking.request import Request
from edgespec.asking.tool_calls import Calls, check_tools, format_of
from edgespec.cli import inspect
from edgespec.history.manage import History
from edgespec.serve.app import App
from edgespec.serve.options import ServeOptions
from edgespec_export.sources.checkpoint import Checkpoint
from edgespec_export.sources.gguf import GGUFFile
from edgespec_export.sources.gguf_checkpoint import GGUFCheckpoint
from edgespec_export.sources.hf_checkpoint import HFCheckpoint
from edgespec_export.sources.hf_tokenizer import to_tokenizer_json
from edgespec_export.sources.open import open_checkpoint
from edgespec_models.bundles.bundle import HEAD_TOKENS, MANIFEST, REPORT, TEMPLATE, Bundle
from edgespec_models.bundles.foreign import open_bundle
from edgespec_models.bundles.foreign_graph import Stated, count_weights, judge, weight_files
from edgespec_models.errors import (
    BundleError,
    EdgespecError,
    ModelFileError,
    RequestError,
    StorageError,
    TokenizerError,
    UnsupportedModelError,
    naming,
)
from edgespec_models.files.onnx_header import read_header
from edgespec_models.text.chat_template import ChatTemplate
from edgespec_models.text.tokenizer import Tokenizer
from tests.kit.asgi import check_answer, requests
from tests.kit.calls import WRITERS
from tests.kit.foreign import ForeignSpec, write_genai, write_optimum
from tests.kit.gguf import ARCHITECTURES, TinyGGUF, tiny_gguf
from tests.kit.gguf_cases import gguf_of
from tests.kit.hf import CASES, config_of, shapes
from tests.kit.histories import SCOPE, delta_of, passage_of, text_of
from tests.kit.models import TEMPLATE as CHAT
from tests.kit.models import toy_model, toy_session, toy_tokenizer
from tests.kit.mtp import gguf as gguf_with_mtp
from tests.kit.sentencepiece import trained
from tests.kit.serving import models_of
from tests.kit.templates import HERMES, LLAMA3, MISTRAL, SHOWN, TOOLS
from tests.kit.tokenizers import byte_level_json, gemma4_metadata, sentencepiece_json
from tests.kit.toy import tiny_bundle

CHECKPOINT = (ModelFileError, UnsupportedModelError, TokenizerError)
HOLE = 1 << 22  # bytes of weights, all zero, which take no room
TEXT = "a cab <|im_end|> é日\u2581\t  the quick 😀 12345\r\n\n <0x41>"
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass(frozen=True)
class Reader:
    """Something that reads what strangers wrote.

    Attributes:
        seeds: sound inputs.
        read: reads one input; raises only ``errors``, which say ``name``.
    """

    seeds: Sequence[bytes]
    read: Callable[[bytes], None]
    errors: tuple[type[EdgespecError], ...]
    name: str = ""


def packed(tree: Any) -> bytes:
    return json.dumps(tree).encode()


def write_files(folder: Path, data: bytes, names: Sequence[str]) -> None:
    """Those of ``names`` that the input, a table in JSON, has; a text stands for bytes, all else for JSON."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
    for name, content in table(data).items():
        if name in names:
            text = content if isinstance(content, str) else json.dumps(content)
            raw = text.encode("latin-1" if name == HEAD_TOKENS else "utf-8", "replace")
            if name.endswith(".safetensors"):
                raw = struct.pack("<Q", len(raw)) + raw
            write_with_hole(folder / name, raw, HOLE if name.endswith(".safetensors") else 0)


def write_with_hole(path: Path, data: bytes, hole: int) -> None:
    """A file that begins with ``data``; zeros follow, as weights."""
    with path.open("wb") as file:
        file.write(data)
        file.truncate(len(data) + hole)


def table(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_checkpoint(checkpoint: Checkpoint) -> None:
    """All that an export reads of facts and tokenizer, and a row of every tensor."""
    special, template = checkpoint.special_tokens(), checkpoint.chat_templates().get("default")
    tokenizer = Tokenizer.from_json(checkpoint.tokenizer_json(), vocab_size=checkpoint.config.vocab_size)
    assert all(id_ < tokenizer.vocab_size for id_ in (*special.eos, special.bos or 0))
    use_tokenizer(tokenizer, "a b")
    if template is not None:
        ChatTemplate(template)
    for name in checkpoint.tensors:
        checkpoint.values(name, 0, 1)


def use_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    """Text and bytes there and back; what the vocabulary cannot spell is a TokenizerError."""
    with allowed(TokenizerError, RequestError):
        tokenizer.decode(tokenizer.encode(text, special=True), skip_special=False)
    with allowed(TokenizerError, RequestError):
        forged = {id_ for id_ in tokenizer.encode(text) if tokenizer.is_special(id_)}
        assert forged <= {tokenizer._unknown}, "a text spells a control token"
    with allowed(TokenizerError):
        assert tokenizer.bytes_of(tokenizer.encode_bytes(text.encode())) == text.encode()


@contextmanager
def allowed(*errors: type[EdgespecError], name: str = "") -> Iterator[None]:
    """What is within may raise these errors and no others; they say ``name``, and can be printed."""
    try:
        yield
    except errors as error:
        message = str(error)
        assert type(error) in errors, f"{type(error).__name__} is not documented here"
        assert not UNPRINTABLE.search(message), (
            "a message that would command a terminal, or cannot be printed"
        )
        assert name in message and len(message) < 5_000, message[:300]


def gguf(folder: Path) -> Reader:
    path = folder / "m.gguf"

    def seed(model: TinyGGUF, **tokens: object) -> bytes:
        model.metadata |= tokens
        model.metadata["tokenizer.chat_template"] = "{{ messages[0].content }}"
        whole = model.write(folder / "seed")
        with GGUFFile(whole) as opened:
            header = min(tensor.offset for tensor in opened.tensors.values())
        return whole.read_bytes()[:header]

    def read(data: bytes) -> None:
        write_with_hole(path, data, HOLE)
        with untouched(path), naming(path), GGUFCheckpoint(path) as checkpoint:
            read_checkpoint(checkpoint)
            if checkpoint.changes:
                with open_checkpoint(path, path) as layer:
                    read_checkpoint(layer)

    models = [tiny_gguf(architecture, "Q8_0", layers=1) for architecture in ARCHITECTURES]
    models += [
        gguf_of(case, "Q8_0")
        for case in (
            *("phi4", "granite", "ministral3", "gemma3_linear", "olmo3", "lfm2", "lfm2_moe", "lfm3"),
            "gpt_oss",
        )
    ]
    models += [gguf_with_mtp()]
    other = seed(tiny_gguf("llama", "Q8_0", layers=1), **gemma4_metadata(size=380))
    return Reader([other, *map(seed, models)], read, CHECKPOINT, path.name)


def safetensors(folder: Path) -> Reader:
    path = folder / "fuzzed-model"
    path.mkdir()
    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")

    def seed(case: str) -> bytes:
        header, at = dict[str, Any](), 0
        config = config_of(case)
        if not any(isinstance(value, list) for value in config.values()):  # which say something of each layer
            config["num_hidden_layers"] = 1
        for name, shape in shapes(config).items():
            size = 2 * prod(shape)
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
            at += size
        special = {"bos_token": "<|endoftext|>", "chat_template": "{{ messages }}"}
        tokenizer = json.loads(byte_level_json(size=310))
        return packed(dict(zip(names, (config, tokenizer, special, header), strict=True)))

    def read(data: bytes) -> None:
        write_files(path, data, names)
        with naming(path), HFCheckpoint(path) as checkpoint:
            read_checkpoint(checkpoint)

    return Reader([seed(case) for case in CASES], read, CHECKPOINT, path.name)


def tokenizer(folder: Path) -> Reader:
    path = folder / "tokenizer.json"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        with untouched(path):
            use_tokenizer(Tokenizer.from_file(path, vocab_size=500), TEXT)

    seeds = [byte_level_json(size=330).encode(), sentencepiece_json(size=330, prefix=True).encode()]
    return Reader(seeds, read, (TokenizerError,), path.name)


def sentencepiece(folder: Path) -> Reader:
    path = folder / "tokenizer.model"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        with untouched(path), naming(path):
            text = to_tokenizer_json(path)
            use_tokenizer(Tokenizer.from_json(text), TEXT)

    return Reader([trained("bpe"), trained("unigram")], read, CHECKPOINT, path.name)


def bundle(folder: Path) -> Reader:
    path = tiny_bundle(folder / "fuzzed-model", head_tokens=tuple(range(0, 300, 2)), role="drafter").path
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    report = {"parity": {"top1_agreement": 1.0, "kl": 0.001}, "row_exact": True, "seconds": 1.5}
    small = {REPORT: report, TEMPLATE: "{{ messages[0].content }}"}
    small[HEAD_TOKENS] = (path / HEAD_TOKENS).read_bytes().decode("latin-1")

    def read(data: bytes) -> None:
        write_files(path, data, tuple(small))
        tree = table(data)
        files = table(packed(table(packed(tree.get(MANIFEST))).get("files")))
        for name in small:  # sizes are right, so that what is read next is met too
            if (path / name).is_file() and isinstance(files.get(name), dict):
                tree[MANIFEST]["files"][name]["size_bytes"] = (path / name).stat().st_size
        write_files(path, packed(tree), (MANIFEST,))
        use_bundle(Bundle(path))

    return Reader([packed({MANIFEST: manifest, **small})], read, (BundleError, TokenizerError), path.name)


def use_bundle(opened: Bundle) -> None:
    """All that is asked of a bundle before a session opens it, and ``edgespec inspect``."""
    assert opened.tokenizer.vocab_size == opened.config.vocab_size
    assert opened.head_tokens is None or len(opened.head_tokens) == opened.manifest.head_rows
    assert opened.chat_template is None or opened.chat_template.arguments is not None
    assert min(opened.manifest.kv_bytes_per_token, opened.manifest.bytes_per_pass) >= 0
    json.dumps(opened.manifest.to_json()).encode()
    console = Console(file=TextIOWrapper(BytesIO(), encoding="utf-8", errors="replace"), width=100)
    with patch.object(inspect, "output", lambda: console):
        inspect.inspect(str(opened.path))


def foreign(folder: Path) -> Reader:
    builder = write_genai(folder / "fuzzed-model", ForeignSpec(external=True))
    spec = ForeignSpec(attention="concat", positions=True, external=True)
    optimum = write_optimum(folder / "fuzzed-model-2", spec)
    special = {"bos_token": {"content": "<|endoftext|>"}, "add_bos_token": True}
    beside = {"generation_config.json": {"eos_token_id": [2, 3]}, "tokenizer_config.json": special}
    places = {"genai_config.json": builder, "config.json": optimum}

    def read(data: bytes) -> None:
        path = builder if "genai_config.json" in table(data) else optimum
        write_files(path, data, (*places, *beside))
        use_bundle(open_bundle(path))

    found = {name: json.loads((path / name).read_text(encoding="utf-8")) for name, path in places.items()}
    seeds = [packed({name: value, **beside}) for name, value in found.items()]
    return Reader(seeds, read, (BundleError, *CHECKPOINT), "fuzzed-model")


def onnx(folder: Path) -> Reader:
    path = folder / "model.onnx"
    stated = Stated(architecture="gpt2", vocab_size=404, context_length=640)
    seed = (write_genai(folder / "seed", ForeignSpec(external=True)) / "model.onnx").read_bytes()

    path.with_name("model.onnx.data").write_bytes(bytes(100))

    def read(data: bytes) -> None:
        path.write_bytes(data)
        with untouched(path):
            header = read_header(path)
            judge(path, header, stated)
        assert all(value >= 0 for value in count_weights(header)["bytes_by_class"].values())
        assert all(folder in file.parents for file in weight_files(path, header)), "weights from elsewhere"

    return Reader([seed], read, (BundleError, UnsupportedModelError), path.name)


def template(_: Path) -> Reader:
    tokens = toy_tokenizer()
    messages = [{"role": "system", "content": "Be <|im_end|> brief."}, {"role": "user", "content": "hi é 😀"}]

    def read(data: bytes) -> None:
        tree = table(data)
        made = ChatTemplate(str(tree.get("source")), bos="<s>")
        made.encode(tree.get("messages"), tokens, {"tools": tree.get("tools")})  # type: ignore[arg-type]

    rest, sources = {"messages": messages, "tools": TOOLS}, (HERMES, LLAMA3, MISTRAL, CHAT)
    seeds = [packed({"source": source, **rest}) for source in sources]
    return Reader(seeds, read, (TokenizerError, RequestError))


def tools(_: Path) -> Reader:
    """Tools that a request gives, and calls read out of an answer as it comes."""
    tags = "".join(f"<parameter={key}>\n1\n</parameter>\n" for key in "ab")
    answers = {
        form: write([("add", {"a": 1, "b": {"c": [None, "</tool_call>"]}})]) for form, write in WRITERS
    }
    answers["xml"] = f"<tool_call>\n<function=add>\n{tags}</function>\n</tool_call>"

    def read(data: bytes) -> None:
        tree = table(data)
        given = Request.of(cast(Any, {"tools": tree.get("tools")})).tools
        check_tools(given)
        form = format_of(SHOWN.get(str(tree.get("form")), HERMES))
        assert form is not None
        functions = {each["function"]["name"]: each["function"].get("parameters") for each in given}
        reader, answer = (
            CallReader(form, functions, [1]),
            str(tree.get("answer")).encode("utf-8", "replace").decode(),
        )
        shown = [reader.push(answer[at : at + 5])[0] for at in range(0, len(answer), 5)]
        shown += reader.push("", final=True)[0]
        Calls(form, given, toy_tokenizer(), several=True).grammar()
        json.dumps([shown, *(call.to_message() for call in reader.calls)], ensure_ascii=False).encode()

    seeds = [packed({"form": form, "tools": TOOLS, "answer": text}) for form, text in answers.items()]
    return Reader(seeds, read, (RequestError, TokenizerError))


def sound_history(path: Path) -> Path:
    from edgespec.history.store import Store

    store = Store.open(path)
    store.merge(SCOPE, delta_of(*(passage_of(number) for number in range(12))), text_of)
    store.close()
    return path


def exchange(folder: Path) -> Reader:
    file = folder / "given" / "exported.json"
    file.parent.mkdir()
    History(sound_history(folder / "sound.history")).export(file)
    seed = file.read_bytes()

    def read(data: bytes) -> None:
        file.write_bytes(data)
        with TemporaryDirectory(dir=folder) as own, untouched(file):
            History(Path(own) / "me.history").load(file)

    return Reader([seed], read, (RequestError,), file.name)


def history(folder: Path) -> Reader:
    seed = sound_history(folder / "sound.history").read_bytes()

    def read(data: bytes) -> None:
        with TemporaryDirectory(dir=folder) as own:
            path = Path(own) / "fuzzed.history"
            path.write_bytes(data)
            History(path).show()
            History(path).forget("the")

    return Reader([seed], read, (StorageError, RequestError), "fuzzed.history")


def server(folder: Path) -> Reader:
    model = toy_model(toy_session(context=1024), toy_session(seed=1, context=1024))
    model.target.chat_template = ChatTemplate(HERMES)
    history = History(folder / "served.history")
    app = App(models_of(model), ServeOptions(timeout_s=0.2, max_new_tokens=6), history)
    return Reader([*map(packed, requests())], lambda data: check_answer(app, table(data)), ())


@contextmanager
def untouched(file: Path) -> Iterator[None]:
    """What is within makes, changes and deletes nothing beside ``file``."""

    def seen() -> dict[str, tuple[int, int]]:
        return {each.name: (each.stat().st_size, each.stat().st_mtime_ns) for each in os.scandir(file.parent)}

    before = seen()
    try:
        yield
    finally:
        assert seen() == before


_FILES = (gguf, safetensors, tokenizer, sentencepiece, bundle, foreign, onnx, exchange, history)
READERS = {read.__name__: read for read in (*_FILES, template, tools, server)}
