"""Passes of graphs with fixed shapes, for devices that compile a graph once.

Imports devices and the modules beside it.
"""
