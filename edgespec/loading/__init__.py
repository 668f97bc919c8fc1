"""From what a user names to open sessions whose passes have a price.

Models are found, pulled and exported at first use, planned for, opened and measured here. Imports decoding's
contracts, and nothing of requests, drafting or histories.
"""
