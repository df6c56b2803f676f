"""The parts of the radix tree; `prefix.radix` puts them together.

`node` and `shape` are what it is made of, `matching` and `insertion` how it is read and added to, `holdings`
(with `owned` and `order`) which ids it has and which go first, `writes` what is being copied to a lower tier,
`answers` and `requests` what goes out and comes in, `checks` its invariants.
"""
