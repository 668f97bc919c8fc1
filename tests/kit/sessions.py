"""Sessions of every kind over tiny models with random weights, all on the CPU."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from hypothesis import strategies as st

from edgespec_export.export import ExportOptions, export_model
from edgespec_models.bundles.foreign import open_bundle
from edgespec_models.bundles.weight_format import WeightFormat
from edgespec_models.graphs.plan import Precision
from edgespec_runtimes.cpu import CpuOptions, open_cpu
from edgespec_runtimes.cuda import DeviceCache, open_cuda
from edgespec_runtimes.devices import CPU, Device
from edgespec_runtimes.session import Session
from edgespec_runtimes.static import open_static
from tests.kit.foreign import ForeignSpec, write_genai, write_written_out
from tests.kit.gguf import ARCHITECTURES, tiny_gguf
from tests.kit.native import tiny_native
from tests.kit.toy import COLUMNS, F32, FLOAT, GEMMA, INT4, INT8, LLAMA, QWEN, WIDE, tiny_bundle

ON_CPU = Device(CPU, "ready")
ONE_THREAD = CpuOptions(threads=1)
TOKENS = [(7 * i * i + 3) % 250 for i in range(40)]
AnySession = Session
Make = Callable[..., object]


def _exported(folder: Path, architecture: str = "llama", kind: str = "F32", **options: Any) -> None:
    source = tiny_gguf(architecture, kind, layers=1 if "device" in options else None)
    export_model(source.write(folder.with_suffix(".gguf")), folder, options=ExportOptions(**options))


def _of(make: Make, *arguments: Any, **options: Any) -> Callable[[Path], object]:
    return lambda folder: make(folder, *arguments, **options)


NATIVE = {
    "Q4_0": _of(tiny_native, LLAMA, "Q4_0"),
    "Q4_1": _of(tiny_native, QWEN, "Q4_1"),
    "Q8_0": _of(tiny_native, GEMMA, "Q8_0"),
}
PORTABLE = {
    "int4": _of(tiny_bundle, LLAMA, INT4),
    "columns": _of(tiny_bundle, LLAMA, COLUMNS),
    "int8": _of(tiny_bundle, LLAMA, INT8),
    "gemma": _of(tiny_bundle, GEMMA, COLUMNS),
    "int8, blocks of 64": _of(tiny_bundle, WIDE, WeightFormat(8, 64)),
}
FOREIGN_EXACT = {
    "gqa, int4": _of(write_genai, ForeignSpec(weights="int4")),
    "gqa, int4, positions": _of(write_genai, ForeignSpec(weights="int4", positions=True)),
    "PyTorch's": _of(write_written_out),
    "window": _of(write_written_out, window=20),
    "positions counted": _of(write_written_out, counted=True),
    "handed on": _of(write_written_out, cast=True),
}
FOREIGN_OTHER = {
    "gqa": _of(write_genai, ForeignSpec()),
    "gqa, positions": _of(write_genai, ForeignSpec(positions=True)),
    "gqa, float16": _of(write_genai, ForeignSpec(kv="float16")),
    "gqa, external": _of(write_genai, ForeignSpec(external=True)),
    "concat": _of(write_genai, ForeignSpec(attention="concat")),
    "concat, positions": _of(write_genai, ForeignSpec(attention="concat", positions=True)),
    "concat, float16": _of(write_genai, ForeignSpec(attention="concat", kv="float16")),
    "alibi": _of(write_written_out, alibi=True),
}
EXPORTED = {f"exported, {n}": _of(_exported, n, "Q4_K", weights="portable") for n in ARCHITECTURES}
DEVICES = {
    "float16": _of(tiny_bundle, LLAMA, INT4, precision=Precision("float16", "float16")),
    "float16, gemma": _of(tiny_bundle, GEMMA, COLUMNS, precision=Precision("float16", "float16")),
    "fixed shapes": _of(_exported, device="npu-openvino", buckets=(64, 128)),
}
EXACT_ON_X86 = PORTABLE | FOREIGN_EXACT | EXPORTED
KINDS = NATIVE | EXACT_ON_X86 | FOREIGN_OTHER | DEVICES | {"float": _of(tiny_bundle, LLAMA, FLOAT)}


def opened(folder: Path, options: CpuOptions = ONE_THREAD) -> AnySession:
    """The session of its kind over the bundle in ``folder``."""
    bundle = open_bundle(folder)
    if bundle.manifest.static is not None:
        return open_static(bundle, ON_CPU, options)
    if bundle.manifest.graph_kind == "dynamic-float16":
        return open_cuda(bundle, ON_CPU, options)
    return open_cpu(bundle, options)


def keeps_rows(session: AnySession) -> bool:
    """Whether parts of its cache can be put aside: it lies where no device has memory of its own."""
    return session.model.cache is not None and not isinstance(session.model.cache, DeviceCache)


def passes(session: AnySession, tokens: Sequence[int], *sizes: int) -> F32:
    """Logits of all ``tokens``, in passes of these sizes (the last again and again)."""
    rows, at = list[F32](), 0
    while at < len(tokens):
        size = sizes[min(len(rows), len(sizes) - 1)]
        rows.append(session.predict(tokens[at : at + size]).logits.copy())
        at += size
    return cast(F32, np.concatenate(rows))


_SPANS = {
    "forward": (1, 12),
    "keep": (0, 12),
    "rewind": (0, 300),
    "prefill": (1, 300),
    "next": (1, 90),
    "reserve": (1, 600),
}
steps = st.lists(
    st.one_of(*(st.tuples(st.just(step), st.integers(*span)) for step, span in _SPANS.items())),
    min_size=1,
    max_size=8,
)


def alike(
    one: AnySession, other: AnySession, steps: Sequence[tuple[str, int]], seed: int, near: float
) -> None:
    """Whatever is asked of both, logits differ by at most ``near`` of the largest."""
    rng, fresh = np.random.default_rng(seed), 0  # rows that a pass has just read
    for session in (one, other):
        session.prefill([])
    for step, number in steps:
        tokens = rng.integers(0, 250, min(number, one.model.longest)).tolist()
        if step == "keep":
            tokens = tokens[:fresh]
        is_possible = step != "forward" or one.length + number <= one.model.longest
        if is_possible and (step != "keep" or fresh):  # prompts are read in pieces of other sizes
            actual, expected = (_ask(session, step, tokens) for session in (one, other))
            assert actual.shape == expected.shape and actual.dtype == np.float32
            np.testing.assert_allclose(actual, expected, atol=near * float(np.abs(expected).max(initial=0.0)))
        assert one.length == other.length
        fresh = {"forward": number, "keep": len(tokens)}.get(step, 0) if is_possible else 0


def _ask(session: AnySession, step: str, tokens: list[int]) -> F32:
    if step == "forward":
        return session.predict(tokens).logits
    if step == "next":
        return session.predict_next(tokens).logits
    if step == "keep":
        session.keep(len(tokens))
    elif step == "rewind":
        assert session.rewind(min(len(tokens), session.length)) == min(len(tokens), session.length)
    elif step == "reserve":
        session.reserve(len(tokens))
    else:
        session.prefill(tokens)
    return np.zeros(0, np.float32)
