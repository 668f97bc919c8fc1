"""Is an export compared with the right reference, and is what comes of that said of each text?"""

from importlib import resources

import numpy as np
import pytest

from edgespec_export.graphs.parity import Golden, check_parity, find_golden

STORED = [
    entry.name
    for entry in (resources.files("edgespec_models") / "golden").iterdir()
    if entry.name.endswith(".npz")
]


@pytest.mark.parametrize("name", STORED)
def test_a_stored_reference_is_found_by_the_digest_of_its_source(name: str) -> None:
    with (resources.files("edgespec_models") / "golden" / name).open("rb") as file, np.load(file) as data:
        golden = find_golden(str(data["source_sha256"]))
        assert golden is not None and f"{golden.name}.npz" == name
        assert sum(golden.texts, ()) == tuple(data["tokens"])
        assert np.array_equal(np.concatenate(golden.top_ids), data["top_ids"])
        assert np.array_equal(np.concatenate(golden.top_logprobs), data["top_logprobs"].astype(np.float32))
    assert len(golden.labels) == len(golden.texts) == len(golden.top_ids) == len(golden.top_logprobs)
    for tokens, ids, logprobs in zip(golden.texts, golden.top_ids, golden.top_logprobs, strict=True):
        assert len(tokens) == len(ids) == len(logprobs)
        assert (np.diff(logprobs, axis=1) <= 0).all()


def test_other_files_have_no_reference() -> None:
    assert find_golden("0" * 64) is None


def test_agreement_and_divergence_are_told_text_by_text() -> None:
    sure, other = np.log(np.array([[0.5, 0.3, 0.2], [0.40, 0.41, 0.19]], np.float32))
    golden = Golden(
        "m",
        ("en", "code"),
        ((1,) * 9, (2,)),
        (np.array([[0, 1]] * 9, np.int32), np.array([[0, 1]], np.int32)),
        (np.array([sure[:2]] * 9), np.log(np.array([[0.41, 0.40]], np.float32))),
    )
    report = check_parity([[np.array([sure] * 9)], [other[None]]], golden)
    assert report["positions"] == 10 and report["top1_agreement"] == pytest.approx(0.9)
    code = 0.41 * np.log(0.41 / 0.40) + 0.40 * np.log(0.40 / 0.41)
    assert report["kl"] == pytest.approx(code / 10, abs=1e-6)
    assert report["by_text"] == {
        "en": {"top1_agreement": 1.0, "kl": pytest.approx(0.0, abs=1e-6)},
        "code": {"top1_agreement": 0.0, "kl": pytest.approx(code, rel=1e-2)},
    }
