"""Weight formats: which one a matrix gets, and how it is rounded.

Imports sources.
"""
