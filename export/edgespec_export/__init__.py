"""Checkpoints in, bundles out: :func:`edgespec_export.export.export_model` is the way in.

Rooms, from the top: ``align`` and ``devices``, ``graphs``, ``formats``, ``sources``; each imports those after
it, and ``edgespec_models`` and ``edgespec_runtimes``.
"""
