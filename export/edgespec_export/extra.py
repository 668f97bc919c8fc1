"""The packages an export needs and running a bundle does not."""

from edgespec_models.errors import EdgespecError

__all__ = ["require_extra"]


def require_extra() -> None:
    """Find out that the ``export`` extra is missing, before anything is downloaded for an export.

    Raises:
        EdgespecError: it is not installed.
    """
    try:
        import onnx_ir  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise EdgespecError(
            f"exporting needs {error.name}, which is not installed: pip install 'edgespec[export]'"
        ) from error
