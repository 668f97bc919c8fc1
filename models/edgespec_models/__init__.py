"""Models: bundles, the catalogue, tokenizers, chat templates and graph definitions."""
