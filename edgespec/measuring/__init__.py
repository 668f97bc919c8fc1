"""Benches, audits and costs, with their reports: how much faster it is here, and whether the output is equal.

It imports what an app imports. Only the command line and alignment import it.
"""
