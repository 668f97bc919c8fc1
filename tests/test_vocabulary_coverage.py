"""tools/vocabulary_coverage.py: how one vocabulary spells another's tokens."""

from edgespec_models.tokenizer import Tokenizer
from tests.tokenizers_for_tests import byte_level_json
from tools.vocabulary_coverage import ends, spelling

TEXT = "The keeper climbed the stairs, and the keeper wrote the weather into a book."


def test_a_vocabulary_spells_itself_in_single_tokens() -> None:
    tokenizer = Tokenizer.from_json(byte_level_json())
    tokens = tokenizer.encode(TEXT)
    assert spelling(tokenizer, tokenizer, tokens) == {"one": len(tokens)}
    assert ends(tokenizer, tokens)[-1] == len(TEXT)


def test_a_smaller_one_needs_runs_and_a_larger_one_reaches_across() -> None:
    large = Tokenizer.from_json(byte_level_json())
    small = Tokenizer.from_json(byte_level_json(size=258))  # bytes, and hardly a merge
    runs = spelling(large, small, large.encode(TEXT))
    assert runs["merged"] > 0 and runs["across"] == 0
    assert runs.total() == len(large.encode(TEXT))
    across = spelling(small, large, small.encode(TEXT))
    assert across["across"] > 0 and across["merged"] == 0
