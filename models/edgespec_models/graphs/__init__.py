"""Graph definitions of the architectures edgespec exports (imports onnxscript)."""
