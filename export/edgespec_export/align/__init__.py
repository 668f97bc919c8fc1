"""Alignment: a drafter trained on what its target writes, kept as a small change of its weights.

:mod:`~edgespec_export.align.alignment` is the file, :mod:`~edgespec_export.align.merge` a checkpoint with the
change in it; both need no extra. :mod:`~edgespec_export.align.decoder` and
:mod:`~edgespec_export.align.training` need PyTorch (extra ``align``).
"""
