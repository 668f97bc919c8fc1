"""Graph definitions of the architectures edgespec exports (needs the ``export`` extra)."""
