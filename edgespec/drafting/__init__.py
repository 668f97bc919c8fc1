"""Sources of proposals (n-grams, a model, a head, an app), and the policy that chooses among them.

This room imports decoding and, for the drafter's half of a loaded model, loading. It imports nothing of
requests or histories.
"""
