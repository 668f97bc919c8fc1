"""A model on the CPU: ONNX Runtime's CPU provider, its KV cache in place in numpy memory.

Greedy decoding with drafts equals decoding without them only if a row's logits do not depend on the number of
rows in the pass. edgespec's own kernels guarantee that. In ONNX Runtime's kernels attention over a single row
has other code, which sums in another order, so a pass over one token runs it twice
(``CpuOptions.exact_rows``).
"""

import ctypes
import hashlib
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Final

import psutil

from edgespec_models.bundles.bundle import Bundle
from edgespec_models.bundles.graph_contract import Part, stream_name
from edgespec_models.decoders.kept import KeptTensor, types_of
from edgespec_models.errors import BundleError, DeviceError
from edgespec_models.schema import Checked, one_of, within
from edgespec_models.storage import prompts_name
from edgespec_runtimes.graph_io import ForeignModel, NativeModel
from edgespec_runtimes.kv_cache import Stretch
from edgespec_runtimes.ort import RUN_ERRORS, lacks_memory, open_session, ort
from edgespec_runtimes.own_thread import OwnThread
from edgespec_runtimes.session import Session

INSTRUCTIONS: Final = ("avx512", "avxvnni", "avx2", "neon_i8mm", "neon_dot", "plain")
"""Sets of instructions with kernels, the fastest first; every processor has ``plain``."""

_LOG = logging.getLogger("edgespec")
_PAST_KEY, _KEY_GAIN, _KEY_SIZES = 1, 8, 13  # inputs of attention
_TENSOR, _FLOAT = 1, 1  # ONNX's TypeProto.tensor_type, TensorProto.FLOAT
_SUFFIXES: Final = {"win32": "dll", "darwin": "dylib"}
_REMEDY: Final = (
    "Install edgespec again, from a package for this platform; or use models exported with "
    "--weights portable, which need no kernels of edgespec's own"
)


def most_threads() -> int:
    """Twice the logical cores of this machine: thousands of spinning threads stop it for minutes."""
    return 2 * (os.cpu_count() or 1)


Threads = Annotated[
    int, within(0, most_threads(), ", twice the logical cores of this machine (0 is the physical cores)")
]
Instructions = Annotated[str, one_of(("", *INSTRUCTIONS))]


@dataclass(frozen=True, slots=True)
class CpuOptions(Checked):
    """How a session uses the CPU.

    Attributes:
        threads: threads of a pass, at most twice the logical cores; 0 takes the physical cores this
            process may use.
        spinning: within a pass, idle threads wait busily for the next operator. Faster; turn it off where
            other programs need the cores.
        exact_rows: run a single token twice in graphs of ONNX Runtime's operators, which makes a row's bits
            independent of the number of rows. A drafter does not need it.
        prefill_chunk: tokens of one prefill pass; between passes a request reports progress and can be
            cancelled.
        instructions: the set of instructions edgespec's kernels use, one of
            :data:`INSTRUCTIONS`; empty takes the best that the processor has.
        huge_pages: weights of edgespec's own graphs are copied into huge pages when they are loaded (Linux),
            which makes passes a tenth faster. Otherwise they stay mapped: loading only opens a file, and
            processes share them.
        copied_bytes: bytes of weights to copy if memory has no room for all. Only weights that every pass
            reads are copied. The others stay mapped, and passes ask the disk for them ahead. None copies all.
        low_priority: passes give way to other programs. They run in threads of their own, because on Linux a
            thread cannot raise its priority again.
        keep_memory: memory that a pass has freed is kept for the next. Faster; turn it off for a few passes
            with little memory.
    """

    threads: Threads = 0
    spinning: bool = True
    exact_rows: bool = True
    prefill_chunk: Annotated[int, within(1)] = 128
    low_priority: bool = False
    keep_memory: bool = True
    instructions: Instructions = ""
    huge_pages: bool = True
    copied_bytes: int | None = None


def default_threads() -> int:
    """Physical cores this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(psutil.cpu_count(logical=False) or allowed, allowed))


def open_cpu(
    bundle: Bundle,
    options: CpuOptions | None = None,
    *,
    row_exact: bool | None = None,
    read_layers: Sequence[int] = (),
) -> Session:
    """Load a bundle's graph on the CPU and prove that it can roll back.

    ``row_exact`` is the result of an earlier self-test with the same bundle, options, processor and version
    of ONNX Runtime, on which alone it depends; None tests now. Of ``read_layers`` predictions have the
    residual streams that enter them (:attr:`Predictions.hidden`), side by side; bits stay the same.

    Raises:
        BundleError: ONNX Runtime cannot load the graph, or the graph cannot roll back.
    """
    if bundle.manifest.static is not None:
        raise BundleError(f"{bundle.path} has graphs of fixed shapes; open it with edgespec.load")
    options = options or CpuOptions()
    native, chunk, exact = bundle.manifest.operators == "edgespec", options.prefill_chunk, options.exact_rows
    streams = [stream_name(layer) for layer in read_layers]
    kept = [tensor for tensor in bundle.manifest.kept if native and tensor.type == "int8"]
    session = open_graph(bundle.graph, options, native=native, streams=streams, in_bytes=kept)
    if not bundle.tensors.own:
        return ForeignModel(session, bundle, chunk=chunk, exact_rows=exact).opened(row_exact)
    model = NativeModel(session, bundle, chunk=chunk, exact_rows=exact, read_layers=read_layers)
    if not native:
        return model.opened(row_exact)
    if not model.takes_several:
        raise BundleError(f"{bundle.path} was made by an earlier version; export the model again")
    if (options.instructions or best_instructions()) == "plain":
        _LOG.warning(
            "%s runs on plain instructions, which take up to 200 times as long as AVX2 does; others need a "
            "processor with AVX2 and FMA, or ARM's dot products. Without them use a model exported with "
            "--weights portable, which runs on ONNX Runtime's kernels",
            bundle.manifest.name,
        )
    _check_shapes(model, bundle.graph)
    model.prompt_key = _prompt_key(bundle)
    return model.opened(row_exact=True)


def _prompt_key(bundle: Bundle) -> str:
    """A key of the bundle and the kernels, on which bits depend. They do not depend on instructions."""
    kept = types_of(bundle.manifest.kept)
    digest = hashlib.sha256(f"{bundle.digest} {library_digest()} {kept}".encode()).hexdigest()
    return f"{prompts_name(bundle.manifest.name)}-{digest[:16]}"


def _check_shapes(model: NativeModel, graph: Path) -> None:
    """Run a pass over no tokens, in which operators compare their shapes and read no weights."""
    try:
        model.reserve(Stretch(), 0)
        model.run([Part((), 0, 0)])
    except DeviceError as error:
        raise BundleError(
            f"the parts of {graph} do not fit each other ({error}); export the model again"
        ) from error


def open_graph(
    graph: Path,
    options: CpuOptions,
    *,
    native: bool = False,
    both: bool = False,
    streams: Sequence[str] = (),
    in_bytes: Sequence[KeptTensor] = (),
) -> Any:
    """ONNX Runtime's session over ``graph``, for target and drafter side by side in one process.

    ``native`` graphs consist of edgespec's own operators, and in ``both`` ONNX Runtime's take as long.
    ``streams`` are values that become outputs. The keys and values ``in_bytes`` are of 8 bits, though the
    file has them in float16.

    Raises:
        BundleError: ONNX Runtime cannot load the graph.
        DeviceError: not enough memory.
    """
    settings = session_settings(options)
    if native:
        if not both:
            settings.intra_op_num_threads = 1  # the operators have threads of their own
        register_operators(settings, options)
    try:
        if streams or in_bytes:
            folder = "session.model_external_initializers_file_folder_path"
            settings.add_session_config_entry(folder, str(graph.parent))
        model: bytes | str = str(graph)
        if streams or in_bytes:
            model = _with_outputs(_over_bytes(graph.read_bytes(), in_bytes), streams)
        opened = partial(open_session, model, settings, ["CPUExecutionProvider"])
        if not options.low_priority:
            return opened()
        return OwnThread(opened, "low", _kept(library()).edgespec_lower_priority)
    except Exception as error:  # ONNX Runtime's own exceptions share no base class
        if lacks_memory(error):
            raise DeviceError(f"not enough memory to load {graph.parent.name}; free some") from error
        raise BundleError(f"ONNX Runtime cannot load {graph} ({error}); export the model again") from error


def session_settings(options: CpuOptions) -> Any:
    """ONNX Runtime's options for a session that shares the process with others."""
    settings = ort.SessionOptions()
    settings.log_severity_level = 3
    settings.intra_op_num_threads = options.threads or default_threads()
    settings.inter_op_num_threads = 1
    settings.enable_cpu_mem_arena = options.keep_memory
    settings.add_session_config_entry("session.intra_op.allow_spinning", "1" if options.spinning else "0")
    # Target and drafter run in turn on the same cores: the threads of one must not wait busily for its next
    # pass while the other's begins. One pool for both would do too, but ONNX Runtime's shared pool is the
    # whole process's: every other session of the application would fail to load.
    settings.add_session_config_entry("session.force_spinning_stop", "1")
    return settings


def library() -> Path:
    """The library for this platform; DeviceError if it is missing."""
    path = Path(__file__).with_name(f"edgespec_kernels.{_SUFFIXES.get(sys.platform, 'so')}")
    if not path.is_file():
        raise DeviceError(f"edgespec's kernels for this platform are missing: there is no {path}. {_REMEDY}.")
    return path


def library_digest() -> str:
    """The SHA-256 of the kernels' library; empty if it is missing."""
    try:
        with library().open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (DeviceError, OSError):
        return ""


def register_operators(settings: Any, options: CpuOptions) -> None:
    """Make the operators known to sessions with these ``settings``, ONNX Runtime's ``SessionOptions``.

    All instructions compute the same bits.

    Raises:
        DeviceError: the library is missing or cannot be loaded, or the processor lacks the instructions.
    """
    path, pages = library(), ""
    if options.huge_pages:
        pages = "all" if options.copied_bytes is None else str(options.copied_bytes)
    wanted = {
        "instructions": options.instructions,
        "threads": str(options.threads or default_threads()),
        "spinning": "1" if options.spinning else "",
        "low": "1" if options.low_priority else "",
        "huge_pages": pages,
    }
    for name, value in wanted.items():
        if value:
            settings.add_session_config_entry(f"edgespec.{name}", value)
    try:
        _kept(path)
        settings.register_custom_ops_library(str(path))
    except OSError as error:
        raise _unusable(path, error) from error
    except RUN_ERRORS as error:
        if lacks_memory(error):
            raise DeviceError(f"not enough memory to load {path.name}; free some") from error
        if "no instructions called" not in str(error):
            raise _unusable(path, error) from error
        raise DeviceError(
            f"this processor lacks the instructions {options.instructions!r}; leave them out for its best "
            f"ones, {best_instructions()}"
        ) from error


@cache
def _kept(path: Path) -> ctypes.CDLL:
    """The library, which stays in the process.

    ONNX Runtime drops it with the last session. Each time that threads start in it anew, it would take one of
    the process's thousand keys for thread-local data.
    """
    return ctypes.CDLL(str(path))


def best_instructions() -> str:
    """The instructions of sessions that name none; DeviceError as for :func:`register_operators`."""
    path = library()
    try:
        ask = _kept(path).edgespec_instructions
    except (OSError, AttributeError) as error:
        raise _unusable(path, error) from error
    ask.argtypes, ask.restype = [], ctypes.c_char_p
    name: bytes = ask()
    return name.decode("ascii")


def _unusable(path: Path, error: Exception) -> DeviceError:
    return DeviceError(f"edgespec's kernels in {path} cannot be loaded: {error}. {_REMEDY}.")


def _with_outputs(model: bytes, names: Iterable[str]) -> bytes:
    """A serialized ONNX model whose values of these names are outputs too, float32 of any shape.

    Fields of a message that come later are added to its lists (the encoding of Protocol Buffers).
    """
    kind = _field(_TENSOR, bytes([1 << 3, _FLOAT]))
    outputs = b"".join(_field(12, _field(1, name.encode()) + _field(2, kind)) for name in names)
    return model + _field(7, outputs)


def _over_bytes(model: bytes, kept: Sequence[KeptTensor]) -> bytes:
    """A serialized ONNX model of edgespec's operators whose attention keeps these tensors in 8 bits.

    Attention learns how large the channels of its keys are by the bias of the product that makes them, or by
    the gain of their normalization.
    """
    if not kept:
        return model
    import onnx  # which other models do not need

    proto = onnx.load_model_from_string(model)
    widths = {name: tensor.shape[1] for tensor in kept for name in (tensor.input, tensor.output)}
    for value in (*proto.graph.input, *proto.graph.output):
        if value.name in widths:
            value.type.tensor_type.elem_type = onnx.TensorProto.INT8
            value.type.tensor_type.shape.dim[-1].dim_value = widths[value.name]
    graph = proto.graph
    makers = {name: node for node in graph.node for name in node.output}
    lengths = {tensor.name: tensor.dims[0] for tensor in graph.initializer}
    for node in [node for node in graph.node if node.op_type == "Attention"]:
        node.op_type = "Attention8"
        owner = makers.get(node.input[_PAST_KEY], node)  # several layers may read the keys of one
        product = makers[owner.input[0]]
        if product.op_type == "Concat":  # of queries, keys and values
            product = makers[product.input[1]]
        # A bias, or a gain behind the product.
        sizes = product.op_type == "Linear" and (product.input[2] or product.input[3])
        node.input.extend([""] * (_KEY_SIZES + 1 - len(node.input)))
        node.input[_KEY_GAIN] = owner.input[_KEY_GAIN]
        if not sizes:
            continue
        facts = {attribute.name: attribute.i for attribute in owner.attribute}
        keys, queries = (facts[count] * facts["head_dim"] for count in ("kv_heads", "heads"))
        gated = lengths[sizes] == 2 * (queries + keys)
        first = 0 if lengths[sizes] == keys else queries * (1 + gated)
        node.input[_KEY_SIZES] = f"{node.output[0]}.key_sizes"
        places = [f"{node.input[_KEY_SIZES]}.{name}" for name in ("first", "end")]
        for name, place in zip(places, (first, first + keys), strict=True):
            graph.initializer.append(onnx.helper.make_tensor(name, onnx.TensorProto.INT64, [1], [place]))
        # ONNX Runtime computes it once.
        graph.node.insert(0, onnx.helper.make_node("Slice", [sizes, *places], [node.input[_KEY_SIZES]]))
    return bytes(proto.SerializeToString())


def _field(number: int, value: bytes) -> bytes:
    """A field with a value of any length."""
    length, size = bytearray(), len(value)
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + value
