"""How tools read their command lines."""

from pathlib import Path

import pytest

from tools.arguments import arguments

OPTIONS = {"prompts": Path, "rows": 32, "peer": [str], "limit": (int,), "fast": False, "memo": Path("a")}


def test_what_is_given_has_its_type_and_what_is_not_its_default() -> None:
    words = ["t", "--prompts", "p", "--peer", "a", "--peer", "b", "--fast", "--limit", "3"]
    read = vars(arguments("usage", "target", words=words, **OPTIONS))
    given = {"target": "t", "prompts": Path("p"), "peer": ["a", "b"], "fast": True, "limit": 3}
    assert read == given | {"rows": 32, "memo": Path("a")}
    read = vars(arguments("usage", "target", words=["t", "--prompts", "p", "--rows", "4"], **OPTIONS))
    assert (read["rows"], read["peer"], read["limit"], read["fast"]) == (4, [], None, False)


@pytest.mark.parametrize("words", [[], ["t"], ["t", "--prompts", "p", "--rows", "many"], ["--prompts", "p"]])
def test_what_is_missing_or_wrong_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        arguments("usage", "target", words=words, **OPTIONS)


def test_several_names_and_dashes() -> None:
    read = arguments(None, "models...", words=["a", "b", "--max-new-tokens", "5"], max_new_tokens=1)
    assert (read.models, read.max_new_tokens) == (["a", "b"], 5)
    assert arguments(None, "models*", words=[]).models == []
