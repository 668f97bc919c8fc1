"""The catalogue, and how models come onto this machine: from a package index, or from the Hugging Face hub.

Imports the rooms files and bundles.
"""
