"""Weight formats: the format of each matrix, and its rounding.

Imports sources.
"""
