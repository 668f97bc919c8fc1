"""Directories with a model to run: bundles, and directories of other exporters (:mod:`.foreign_bundle`)."""

from pathlib import Path

from edgespec_models.bundles.bundle import GENAI, HF_CONFIG, MANIFEST, Bundle
from edgespec_models.errors import BundleError

_OPTIMUM_GRAPHS = ("model.onnx", "onnx/model.onnx")


def is_model(folder: Path) -> bool:
    """Whether ``folder`` is a model that can be opened without an export."""
    marks = (MANIFEST, GENAI)
    return any((folder / name).is_file() for name in marks) or _optimum_graph(folder) is not None


def what_instead(folder: Path) -> str | None:
    """The content of a directory without a model to open or to export, and the remedy; None for others."""
    if any(folder.glob("model*.safetensors")):
        return None
    if (folder / "adapter_config.json").is_file():
        return "is an adapter (LoRA), not a model; give its base model, and this as --adapter"
    files = [*folder.glob("*.onnx"), *folder.glob("onnx/*.onnx")]
    graphs = sorted(file.relative_to(folder).as_posix() for file in files)
    if graphs and (folder / HF_CONFIG).is_file():
        return f"has {graphs[0]}, not {' or '.join(_OPTIMUM_GRAPHS)}; rename the graph to run"
    files = sorted(folder.glob("*.gguf"))
    if files and not (folder / HF_CONFIG).is_file():
        return f"is a directory of GGUF files; give one of them, such as {files[0]}"
    return None


def open_bundle(path: Path, *, verify_digests: bool = False) -> Bundle:
    """Open a bundle, or a directory of onnxruntime-genai's builder, mobius or Optimum.

    ``verify_digests`` compares every file's sha256 with the manifest, which only bundles have.

    Raises:
        BundleError: the directory is neither, is damaged, or lacks the digests to verify.
        UnsupportedModelError: a model that edgespec cannot run.
        EdgespecError: a damaged tokenizer or configuration.
    """
    instead = None if is_model(path) else what_instead(path)
    if instead is not None:
        raise BundleError(f"{path} {instead}")
    if (path / MANIFEST).is_file() or not is_model(path):
        return Bundle(path, verify_digests=verify_digests)
    if verify_digests:
        raise BundleError(
            f"{path} records no digests to compare with; only bundles that edgespec exported do"
        )
    from edgespec_models.bundles.foreign_bundle import ForeignBundle  # bundles need none of it

    return ForeignBundle(path, None if (path / GENAI).is_file() else _optimum_graph(path))


def _optimum_graph(folder: Path) -> Path | None:
    """Optimum's graph; None beside safetensors, from which an export is better."""
    if not (folder / HF_CONFIG).is_file() or any(folder.glob("*.safetensors")):
        return None
    graphs = (folder / name for name in _OPTIMUM_GRAPHS)
    return next((graph for graph in graphs if graph.is_file()), None)
