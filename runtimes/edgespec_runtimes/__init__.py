"""A model that runs: sessions, their KV caches, devices and what a pass costs."""
