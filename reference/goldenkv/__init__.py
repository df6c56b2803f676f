"""goldenkv: a readable JAX reference of CSA+HCA attention whose state reloads bit for bit."""

__version__ = "0.1.0"
