"""Whether delta encoding pays on KV state: real rows, codecs with and without neighbours, effects."""
