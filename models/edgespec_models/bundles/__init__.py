"""Models on disk that can be run: bundles, and directories that other exporters wrote.

Imports the rooms files and text.
"""
