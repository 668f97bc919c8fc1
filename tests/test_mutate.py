"""The tool that asks whether tests notice faults: a weak test leaves survivors, a strong one none."""

import os
from pathlib import Path

import pytest

pytest.importorskip("mutmut")
if not hasattr(os, "fork"):
    pytest.skip("mutants are forks", allow_module_level=True)

from tools.mutants import changed_functions, mutants
from tools.mutate import Checkout, executed, verdicts

MODULE = '''"""A toy."""

LIMIT = 3


def clipped(value: int) -> int:
    """At most the limit."""
    if value > LIMIT:
        return LIMIT
    return value
'''
WEAK = "from toy import clipped\n\n\ndef test_it_runs():\n    assert clipped(5)\n    assert clipped(1)\n"
STRONG = """import pytest
from toy import clipped


@pytest.mark.parametrize(("value", "expected"), [(5, 3), (4, 3), (3, 3), (-1, -1)])
def test_it_clips(value, expected):
    assert clipped(value) == expected
"""


def tried(work: Path, test: str) -> dict[str, str]:
    """What became of each mutant of the toy, by the changed line."""
    checkout = Checkout(work, work)
    for name, text in {
        "toy.py": MODULE,
        "tests/test_toy.py": test,
        "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["."]\nmarkers = ["models"]\n',
    }.items():
        file = checkout.tree / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
    made = list(mutants("toy.py", MODULE))
    known = executed(checkout, ["toy.py"], ["tests/test_toy.py"])
    found = {mutant.after: verdict for mutant, verdict, _ in verdicts(checkout, made, known, 10.0)}
    assert checkout.text("toy.py") == MODULE
    return found


def test_a_weak_test_leaves_survivors(tmp_path: Path) -> None:
    found = tried(tmp_path, WEAK)
    assert found == {
        "LIMIT = 4": "survived",
        "if value >= LIMIT:": "survived",
        "if not (value > LIMIT):": "survived",
    }


def test_a_strong_test_leaves_none_but_the_equivalent(tmp_path: Path) -> None:
    found = tried(tmp_path, STRONG)
    assert found.pop("if value >= LIMIT:") == "survived"
    assert set(found.values()) == {"killed"}


def test_types_and_wording_are_left_alone() -> None:
    text = 'def refuse(n: "int | None" = None) -> None:\n    raise ValueError("no" + str(n))\n'
    assert [mutant.after.strip() for mutant in mutants("toy.py", text)] == ['raise ValueError("no" - str(n))']


@pytest.mark.parametrize(("line", "functions"), [("value > LIMIT", {"clipped"}), ("LIMIT = 3", None)])
def test_what_runs_at_import_is_told_from_functions(line: str, functions: set[str] | None) -> None:
    changed = MODULE.replace(line, line.replace("3", "4").replace(">", "<"))
    codes = changed_functions(MODULE, changed)
    assert (codes and {code.co_name for code in codes}) == functions
