"""What ``import edgespec`` gives, and what it costs."""

import os
import subprocess
import sys

import pytest

import edgespec


def _in_fresh_interpreter(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return done.stdout.strip()


@pytest.mark.parametrize("name", edgespec.__all__)
def test_every_name_can_be_imported(name: str) -> None:
    value = getattr(edgespec, name)
    assert value.__name__ == name
    assert value.__doc__


def test_the_list_of_names_is_whole() -> None:
    assert len(set(edgespec.__all__)) == len(edgespec.__all__)
    assert set(edgespec.__all__) == edgespec._HOMES.keys()
    assert set(edgespec.__all__) <= set(dir(edgespec))


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        _ = edgespec.lod


def test_importing_loads_nothing_heavy() -> None:
    heavy = "{'numpy', 'onnxruntime', 'tokenizers', 'huggingface_hub', 'rich', 'typer', 'onnx', 'jinja2'}"
    code = f"import sys, edgespec; print(sorted({heavy} & sys.modules.keys()))"
    assert _in_fresh_interpreter(code) == "[]"
    assert _in_fresh_interpreter(code.replace("edgespec;", "edgespec; edgespec.load;")) != "[]"


def test_the_sdk_does_not_load_the_exporter() -> None:
    code = "import sys, edgespec; edgespec.load; print('onnx' in sys.modules or 'onnxscript' in sys.modules)"
    assert _in_fresh_interpreter(code) == "False"
