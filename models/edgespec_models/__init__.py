"""What a model is: bundles, the catalogue, tokenizers, chat templates and graph definitions."""
