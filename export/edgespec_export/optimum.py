"""Exports of other architectures through Optimum's exporter.

Optimum (optimum-onnx 0.1) needs versions of transformers and huggingface_hub that exclude edgespec's, so it
cannot be imported here. Its command runs in an environment of its own, and its result is opened, tried and
kept unchanged.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from edgespec_export.staging import check_place, staging
from edgespec_models.bundles.bundle import HF_CONFIG
from edgespec_models.bundles.foreign import is_model, open_bundle
from edgespec_models.errors import EdgespecError, ModelFileError
from edgespec_models.progress import Progress, ProgressCallback, ignore_progress
from edgespec_models.storage import bytes_at, writing
from edgespec_runtimes.cpu import CpuOptions, open_cpu

_TASK = "text-generation-with-past"
_SHOWN_LINES = 3
_RECIPE = (
    "Optimum's versions exclude edgespec's, so it needs an environment of its own: python -m venv optimum; "
    "optimum/bin/pip install optimum-onnx onnxruntime torch (on Windows optimum\\Scripts\\pip); "
    "then give --optimum-cli optimum/bin/optimum-cli"
)


def export_with_optimum(
    source: Path,
    out: Path,
    *,
    program: str,
    overwrite: bool = False,
    progress: ProgressCallback = ignore_progress,
) -> dict[str, Any]:
    """Have Optimum export ``source`` to ``out``, a directory that edgespec runs.

    ``out`` appears only after it was opened and has rolled back. Returns the ``architecture`` of
    ``config.json``; whether every pass writes the whole KV cache anew (``copies_cache``); whether a row's
    bits do not depend on the number of rows (``row_exact``); bytes of both directories (``source_bytes``,
    ``bytes``) and ``seconds``.

    Raises:
        ModelFileError: no Hugging Face directory.
        RequestError: ``out`` exists.
        EdgespecError: the program is missing or failed (the message has its last lines), or edgespec cannot
            run its result.
        StorageError: the disk is full, or ``out`` cannot be written.
    """
    started = perf_counter()
    check = partial(check_place, source, out, overwrite=overwrite, replaceable=lambda: is_model(out))
    check()
    if not (source / HF_CONFIG).is_file():
        raise ModelFileError(f"{source} lacks {HF_CONFIG}; Optimum exports Hugging Face directories")
    place = shutil.which(program)
    if place is None:
        raise EdgespecError(f"there is no program {program!r}. {_RECIPE}")
    with writing(out), staging(out, check) as folder:
        progress(Progress("Exporting with Optimum", 0, 1, "model"))
        _run([place, "export", "onnx", "--model", str(source.resolve()), "--task", _TASK, str(folder)])
        progress(Progress("Exporting with Optimum", 1, 1, "model"))
        report = _tried(source, folder, started)
    return report


def _tried(source: Path, folder: Path, started: float) -> dict[str, Any]:
    """Run Optimum's result. Nothing stays open, because Windows moves no open files."""
    bundle = open_bundle(folder)
    with closing(open_cpu(bundle, CpuOptions())) as session:
        copies_cache, row_exact = session.model.copies_cache, session.model.row_exact
    return {
        "architecture": bundle.config.architecture,
        "copies_cache": copies_cache,
        "row_exact": row_exact,
        "source_bytes": bytes_at(source),
        "bytes": bytes_at(folder),
        "seconds": perf_counter() - started,
    }


def _run(command: Sequence[str]) -> None:
    """Run the command to its end without network: all files are in the source's directory."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "ORT_DISABLE_TELEMETRY": "1"}
    try:
        result = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise EdgespecError(f"cannot run {command[0]}: {error}. {_RECIPE}") from error
    if result.returncode:
        lines = [line.strip() for line in result.stdout.splitlines() if line.strip()]
        message = " / ".join(lines[-_SHOWN_LINES:]) or "it said nothing"
        raise EdgespecError(f"{command[0]} failed with code {result.returncode}: {message}")
