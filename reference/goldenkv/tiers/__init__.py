"""Tiers: where state goes when it leaves the device, and how it comes back.

`store` is the protocol and `objects` what is stored; the stores are host memory, a local disk and engines on
other machines; wrappers encrypt, limit, split and break them; the mover copies between them and the device.
"""
