"""What a drafter learns from its user while it drafts."""

from edgespec.learning.correction import Correction
from edgespec.learning.weights import Weights

__all__ = ["Correction", "Weights"]
