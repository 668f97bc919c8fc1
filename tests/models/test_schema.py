"""One check at the door: values of wrong types and out of range are refused by name, before work begins."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import edgespec
from edgespec.asking.request import Request, RequestOptions
from edgespec.decoding.sampling import SamplingParams
from edgespec.history import History
from edgespec.measuring.bench import BenchOptions
from edgespec_export.export import ExportOptions, export_model
from edgespec_export.formats.quantization import Quantization
from edgespec_models.errors import RequestError
from edgespec_models.schema import checked, length, shown, within
from edgespec_runtimes.cpu import CpuOptions

OPTIONS = BenchOptions, CpuOptions, ExportOptions, edgespec.LoadOptions, Quantization, Request, SamplingParams
FIELDS = [(cls, field.name) for cls in OPTIONS for field in fields(cls)]


class Hostile:
    def __repr__(self) -> str:
        raise ValueError("no")


VALUES = st.sampled_from(
    [object(), Hostile(), [1], {"a": 1}, b"x", -1, 10**5000, 1.5, float("nan"), "\ud800", print, None]
)


@given(case=st.sampled_from(FIELDS), value=VALUES | st.text() | st.floats() | st.integers())
def test_a_value_is_taken_or_refused_by_name(case: tuple[type, str], value: object) -> None:
    cls, name = case
    try:
        taken = getattr(cls(**{name: value}), name)
    except RequestError as error:
        assert str(error).startswith(name) and "; allowed: " in str(error)
    else:
        allowed = type(getattr(cls(), name)) | str | float | int | tuple | None
        assert isinstance(taken, allowed) or callable(taken)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": None}, "max_new_tokens is None; allowed: a whole number from 0 to"),
        ({"max_new_tokens": "8"}, "max_new_tokens is '8'"),
        ({"max_new_tokens": True}, "max_new_tokens is True"),
        ({"stop": [1]}, r"stop\[0\] is 1; allowed: a text"),
        ({"stop": 3}, "stop is 3; allowed: a list"),
        ({"stop": [""]}, r"stop\[0\] is ''"),
        ({"stop": ""}, r"stop\[0\] is ''"),
        ({"max_tokens": -1}, "max_new_tokens is -1; allowed: a whole number from 0"),
        ({"max_tokens": 5, "max_new_tokens": 6}, "max_tokens is 5 and max_new_tokens 6.*leave out one"),
        ({"presence_penalty": 3}, "presence_penalty is 3; allowed: a number from -2 to 2"),
        ({"logit_bias": {"7": 1}}, r"logit_bias\[key '7'\] is '7'; allowed: a whole number from 0"),
        ({"logit_bias": {7: 101}}, r"logit_bias\[7\] is 101; allowed: a number from -100 to 100"),
        ({"logit_bias": [7]}, r"logit_bias is \[7\]; allowed: a table"),
        ({"logprobs": 1}, "logprobs is 1; allowed: True or False"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs is 21; allowed: a whole number from 0 to 20"),
        ({"top_logprobs": 3}, "top_logprobs is 3; allowed: 0, or more with logprobs=True"),
        ({"n": 0}, "n is 0; allowed: a whole number from 1 to 128"),
        ({"tools": {}}, "tools is {}; allowed: a list"),
        ({"tools": [{"name": "f"}]}, r"tools\[0\] is .*'type': 'function'"),
        ({"tools": [{"type": "web", "function": {"name": "f"}}]}, r"tools\[0\] is "),
        ({"tool_choice": "must"}, "tool_choice is 'must'; allowed: a text out of 'auto', 'none'"),
        ({"tool_choice": "required"}, "tool_choice is 'required'; allowed: .*with tools"),
        ({"tool_choice": {"function": {"name": "f"}}}, "tool_choice is .*'f'.*one of the tools, none here"),
        ({"template_args": "x"}, "template_args is 'x'; allowed: a table"),
        ({"drafter": "ngram"}, "drafter is 'ngram'; allowed: a Drafter or None"),
        ({"stop_at_eos": "no"}, "stop_at_eos is 'no'; allowed: True or False"),
        ({"cancelled": None}, "cancelled is None; allowed: a function"),
        ({"temperature": "hot"}, "temperature is 'hot'; allowed: a number from 0 to 100"),
        ({"top_p": -0.1}, "top_p is -0.1; allowed: a number from 0 to 1"),
        ({"seed": 2**64}, r"seed is 18446744073709551616; allowed: a whole number from -9\d+ to"),
        ({"colour": 1}, "unknown option .*'colour'.*; allowed: .*max_new_tokens"),
    ],
)
def test_requests(options: RequestOptions, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Request.of(options)


def test_second_names_short_forms_and_numbers_of_numpy() -> None:
    given: Any = {"max_tokens": np.int64(7), "stop": "END", "logit_bias": {np.int64(3): 1}}
    request = Request.of(given | {"temperature": np.float32(0.5)})
    assert (request.max_new_tokens, request.stop) == (7, ("END",))
    assert request.sampler.logit_bias == {3: 1.0}
    assert (type(request.max_new_tokens), type(request.sampler.temperature)) == (int, float)
    assert Request.of({"max_tokens": 7, "max_new_tokens": 7, "stop": ["a"]}).stop == ("a",)


LONG = "x" * 10_000
CALLS: Mapping[str, tuple[Callable[[], object], str]] = {
    "no target": (lambda: edgespec.load(None), "target is None"),  # type: ignore[arg-type]
    "a number": (lambda: edgespec.load(3), "target is 3"),  # type: ignore[arg-type]
    "an empty name": (lambda: edgespec.load(""), "target is ''"),
    "a long name": (lambda: edgespec.load(LONG), "target is 'xxx.*length 1 to 4096"),
    "a name too long for a file": (lambda: edgespec.load("x" * 1000), "xxx.* name that 'edgespec models'"),
    "options that are a table": (lambda: edgespec.load("m", options={}), "options is {}"),  # type: ignore[arg-type]
    "a history": (lambda: edgespec.load("m", history=3), "history is 3"),  # type: ignore[arg-type]
    "progress": (lambda: edgespec.load("m", progress=3), "progress is 3"),  # type: ignore[arg-type]
    "history": (lambda: History(None), "history is None"),  # type: ignore[arg-type]
    "a long name of a history": (lambda: History("/" + "x" * 4000), "cannot be opened"),
    "a file to import": (lambda: History("p").load("x"), "file is 'x'; allowed: a Path"),  # type: ignore[arg-type]
    "a text to forget": (lambda: History("p").forget(None), "text is None"),  # type: ignore[arg-type]
    "a source": (lambda: export_model(None, Path("o")), "source is None"),  # type: ignore[arg-type]
    "a device of an export": (lambda: ExportOptions(device="tpu"), "device is .tpu"),  # type: ignore[arg-type]
    "drafts too long": (lambda: edgespec.LoadOptions(max_draft=65), "max_draft is 65; allowed: .* 1 to 64"),
    "a bucket": (lambda: ExportOptions(buckets=(0, 64)), r"buckets\[0\] is 0; allowed: .* from 64"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    call, said = CALLS[name]
    with pytest.raises(RequestError, match=said) as caught:
        call()
    assert len(str(caught.value)) < 400


@checked
def example(
    a: Annotated[int, within(1)], b: Annotated[tuple[str, ...], length(1)] = ("x",), **rest: Any
) -> object:
    return a, b, rest


def test_a_function_is_called_with_what_was_checked() -> None:
    assert example(1, b=["y"], c=3) == (1, ("y",), {"c": 3})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"a is 0; allowed: a whole number from 1$"):
        example(0, ("x",))
    with pytest.raises(TypeError, match="missing"):
        example()  # type: ignore[call-arg]
    for value in (Hostile(), 10**5000, "\ud800", LONG, [LONG] * 1000, {LONG: LONG}):
        assert len(shown(value)) < 400
