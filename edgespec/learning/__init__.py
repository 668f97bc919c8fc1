"""Teaching a drafter what its target writes, on the user's machine: NumPy, no training framework.

It imports decoding alone, and the libraries below ``edgespec``.
"""
