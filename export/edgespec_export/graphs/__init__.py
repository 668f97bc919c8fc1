"""Graphs and weights on disk, and whether they compute what their source computes.

Imports sources and formats.
"""
