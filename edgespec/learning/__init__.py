"""Training of a drafter on its target's answers, on the user's machine, with NumPy alone.

It imports decoding alone, and the libraries below ``edgespec``.
"""
