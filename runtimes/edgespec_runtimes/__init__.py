"""Running models: sessions, their KV caches, devices and the costs of passes."""
