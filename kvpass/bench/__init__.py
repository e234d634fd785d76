"""Kernel benchmarks behind ``kvpass bench``: nothing is timed that was not checked in the same run.

shapes.py     the shapes by name, and how one's own are written
timing.py     CUDA-graph replay, variants interleaved, median and spread; the measured ceilings
record.py     what a row says about its machine; JSON lines and tables
attention.py  decode attention over every format; checked against an fp64 oracle on the same bytes
peers.py      what it is compared with
store.py      quantize-and-store; checked bit for bit
"""
