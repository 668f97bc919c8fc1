"""Graphs and weights on disk, what is measured with them, and whether they
compute what their source computes.

Imports formats and sources.
"""
