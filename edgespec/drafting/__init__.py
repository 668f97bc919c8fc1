"""Where proposals come from (n-grams, a model, an app), and the policy that decides which of them are made.

Imports decoding and, for the drafter's half of a loaded model, loading and learning; nothing of requests or
histories.
"""
