"""Graphs and weights on disk, measurements with them, and comparisons with their source.

Imports formats and sources.
"""
