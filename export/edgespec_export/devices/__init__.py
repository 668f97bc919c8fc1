"""Bundles for devices that compile graphs of fixed shapes.

Imports graphs, formats and sources.
"""
