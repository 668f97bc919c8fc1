"""Files, whatever they hold: written whole or not at all, and read with care.

Imports errors and the schema alone.
"""
