"""Kernels that ptxas compiles wrong, told by their machine code.

ptxas 12.8, which comes with triton 3.6, leaves a register undefined in some kernels with products of warpgroups: a
uniform register that says where an operand lies in shared memory. Such a kernel reads what the kernel before it left
there, and faults, or sums something else. It was seen in attention of several rows with head_dims of 16, 32 and 64;
which formats, masks and kept slots it hits cannot be told from outside. ptxas 12.9 and 13.0 compile the same PTX right.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from typing import Any

import triton

from kvpass.kernels.codecs import interpreting

FIRST_SOUND = (12, 9)
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*(\S.*?) *;")
_sound: dict[str, bool] = {}  # by the hash of a compiled kernel


@functools.cache
def is_suspect() -> bool:
    """Whether triton's ptxas is one to look after."""
    if interpreting():
        return False
    try:
        version = triton.knobs.nvidia.ptxas.version
    except (AttributeError, OSError, RuntimeError):  # no NVIDIA compiler here
        return False
    return tuple(map(int, version.split(".")[:2])) < FIRST_SOUND


def is_sound(kernel: Any) -> bool:
    """Whether a compiled kernel reads no undefined register, as far as can be told; looked up once."""
    if kernel.hash not in _sound:
        try:
            _sound[kernel.hash] = not undefined_registers(kernel.asm["cubin"])
        except (KeyError, OSError, RuntimeError, subprocess.CalledProcessError):
            _sound[kernel.hash] = False
    return _sound[kernel.hash]


def disassembled(cubin: bytes, what: str = "--dump-sass") -> str:
    """What triton's cuobjdump prints of a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def undefined_registers(cubin: bytes) -> list[str]:
    """Instructions that read a uniform register which no instruction above them writes."""
    written, found = {"UR63"}, []  # UR63 is zero
    for text in _INSTRUCTION.findall(disassembled(cubin)):
        name, _, operands = text.partition(" ")
        own, _, others = operands.partition(",")
        writes = re.match(r"\s*UR(\d+)", own)
        read = set(re.findall(r"\bUR\d+\b", others if writes else operands))
        for first in re.findall(r"gdesc\[UR(\d+)\]", operands):  # a pair for each operand; the first's may be unused
            read = (read - {f"UR{first}"}) | {f"UR{int(first) + 2}", f"UR{int(first) + 3}"}
        if read - written:
            found.append(text)
        if writes:
            wide = 4 if ".128" in name else 2 if ".64" in name or "WIDE" in name else 1
            written |= {f"UR{int(writes[1]) + i}" for i in range(wide)}
    return found
