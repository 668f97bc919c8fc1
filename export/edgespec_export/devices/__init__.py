"""Bundles for devices that compile fixed shapes.

Imports sources, formats and graphs.
"""
