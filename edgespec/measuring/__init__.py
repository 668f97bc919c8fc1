"""How much faster is it here, and is the output the same? Benches, audits, costs, and their reports.

Imports what an app imports; nothing imports it but the command line and alignment.
"""
