"""The share of the processor that other programs took: measured, and told where it is much."""

import os
import subprocess
import sys

from edgespec.measuring.other_programs import OtherPrograms, warning


def test_other_programs_are_seen() -> None:
    program = "import time; end = time.perf_counter() + 0.6\nwhile time.perf_counter() < end: pass"
    watch = OtherPrograms()
    subprocess.run([sys.executable, "-c", program], check=True)
    assert 0.1 / (os.cpu_count() or 1) < watch.share() <= 1


def test_a_warning_says_how_much() -> None:
    assert warning(0.02) is None
    assert "took 45% of the processor" in str(warning(0.451))
