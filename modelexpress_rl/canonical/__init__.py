"""Canonical weights in object storage: what versions look like there, written and read with bounded memory.

`index`, `tensor_file`, `xor` and `plain_files` are the format of 0.7.0; `sparse` is ours. Nothing here
talks to a network: objects are read through `objects.ObjectReader`.
"""
