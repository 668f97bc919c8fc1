"""``edgespec align``: a target answers prompts, and its drafter is trained on the answers.

It imports measuring, requests, loading and decoding, and ``edgespec_export``, which trains.
"""
