"""Weight formats: which one a matrix gets, how it is rounded, and how its bytes are laid out.

Imports sources.
"""
