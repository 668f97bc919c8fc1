"""Devices besides the CPU: which there are, which one a bundle is to run on, and how a GPU runs it.

Imports the modules beside this room; of them only the one for fixed shapes imports it.
"""
