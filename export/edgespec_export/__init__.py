"""Makes bundles of checkpoints, by :func:`edgespec_export.export.export_model`.

Rooms, from the top: ``align`` and ``devices``, ``graphs``, ``formats``, ``sources``; each imports the rooms
after it, and ``edgespec_models`` and ``edgespec_runtimes``.
"""
