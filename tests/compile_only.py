"""Takes kernels through their launchers with a driver that only compiles, for an H200 and without one. Triton's
interpreter accepts what its compiler does not.

To be run in a process of its own: the interpreter, which other tests use, cannot be turned off again there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch
import triton
from triton.backends.compiler import GPUTarget

FORMATS = ("fp8_e4m3", "int8", "nvfp4+centred+rotated+4over6")
# Formats of K and V, and how many slots are kept, of chunks' kernels that ptxas 12.8 compiles wrong (head_dim 64).
CHUNKS = (("fp8_e4m3", "nvfp4", 0), ("int8", "fp4_mx_block16", 0), ("nvfp4", "nvfp4", 12), ("mxfp4", "nvfp4", 12))


class _CompileOnly:
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


class _Warmup:
    def __init__(self, kernel, compiled: list):
        self.kernel, self.compiled = kernel, compiled

    def __getitem__(self, grid):
        return lambda *args, **options: self.compiled.append(self.kernel.warmup(*args, grid=grid, **options))


def only_compile(kernels: dict[ModuleType, tuple[str, ...]]) -> list:
    """Have launchers compile these kernels of their modules for meta tensors. Returns the list that they go to."""
    triton.runtime.driver.set_active(_CompileOnly())
    compiled: list = []
    for module, names in kernels.items():
        for name in names:
            setattr(module, name, _Warmup(getattr(module, name), compiled))
    return compiled


def _dump(cubin: bytes, what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def spilled_bytes(cubin: bytes) -> int:
    """Bytes of local memory that a thread uses."""
    return max(int(n) for n in re.findall(r"STACK:(\d+)", _dump(cubin, "--dump-resource-usage")))


def waits_first(cubin: bytes) -> bool:
    """Whether a wait for the kernel before comes first, then leave for the next one, then all reads and writes."""
    found = re.findall(r"\b(ACQBULK|PREEXIT|LDG|STG|LDGSTS|ATOMG|LD|ST)\b", _dump(cubin, "--dump-sass"))
    return found[:2] == ["ACQBULK", "PREEXIT"] and not {"ACQBULK", "PREEXIT"} & set(found[2:])


def undefined_registers(cubin: bytes) -> list[str]:
    """Instructions that read a uniform register which no instruction above them writes. A register that was lost and
    held something else before is not found."""
    written, found = {"UR63"}, []  # UR63 is zero
    sass = _dump(cubin, "--dump-sass")
    for text in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*(\S.*?) *;", sass):
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


def run(script: str) -> object:
    """What a script of the tests that compiles in this way prints last, as JSON."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Compile every plain kernel as a decode step and a chunk launch it, with slots kept in bf16; print all names,
    those that wait for the kernel before them ahead of all else, what reads undefined registers, the most shared
    memory of a program, and the most bytes that a thread of the kernel that learns spills."""
    from kvpass import tiles
    from kvpass.formats import get_format
    from kvpass.kernels import attention, dequantize, learn, rotate, store

    own = {attention: ("attention_kernel", "reduce_kernel", "survey_kernel"), dequantize: ("_dequantize_kernel",)}
    own |= {store: ("_store_kernel",), rotate: ("_rotate_kernel",), learn: ("_learn_kernel",)}
    compiled = only_compile(own)
    for module in (attention, dequantize, learn, rotate, store):
        module.on_device = lambda tensor: contextlib.nullcontext()
    attention.native_float8 = dequantize.native_float8 = lambda device: True
    rotate.early_launch = store.early_launch = lambda device: {"LAUNCHES_EARLY": True, "launch_pdl": True}
    attention._sm_count, attention._hopper = lambda device: 132, lambda: None
    for name in FORMATS:
        for length in (1, 300):
            buffers = get_format(name).allocate(4, 8, 4096, 128, "meta", keep=12)
            x = torch.empty(4, 8, length, 128, dtype=torch.bfloat16, device="meta")
            query = torch.empty(4, 32, length, 128, dtype=torch.bfloat16, device="meta")
            mask = torch.empty(4, 1, length, 4096, dtype=torch.bool, device="meta")
            positions = torch.empty(length, dtype=torch.int64, device="meta")
            store.store(x, x, positions, *buffers, *buffers, name, name, 4)
            attention.attention(query, *buffers, *buffers, positions, mask, 1.0, False, name, name)
            dequantize.dequantize(*buffers, positions, name, torch.bfloat16)
    for dtype, head_dim, pairs in ((torch.bfloat16, 128, 64), (torch.float32, 64, 32), (torch.float16, 512, 128)):
        x = torch.empty(4, 8, 256, head_dim, dtype=dtype, device="meta")
        scale, centre = torch.empty(8, device="meta"), torch.empty(8, head_dim, device="meta")
        turns, is_written = torch.empty(257, pairs, 2, device="meta"), torch.empty(256, dtype=torch.bool, device="meta")
        for written in (None, is_written):
            name = "nvfp4+centred"
            learn.learn(x, x, scale, centre, scale, centre, turns, written, True, True, name, name)
    for key, value, keep in CHUNKS:
        sides = (get_format(name).allocate(4, 8, 4096, 64, "meta", keep=keep) for name in (key, value))
        query = torch.empty(4, 32, 40, 64, dtype=torch.bfloat16, device="meta")
        positions = torch.empty(40, dtype=torch.int64, device="meta")
        mask = torch.empty(4, 1, 40, 4096, dtype=torch.bool, device="meta") if keep else None
        attention.attention(query, *next(sides), *next(sides), positions, mask, 1.0, not keep, key, value)
    # The tiles of the largest head_dims in the package's file, with the mask that takes most.
    file = tiles.packaged("NVIDIA H200")
    for shape, config in tiles.read(file, "NVIDIA H200").items():
        if shape.kind == "chunk" and shape.head_dim >= 256:
            name = {4: "nvfp4", 8: "fp8_e4m3", 16: "bf16"}[shape.bits]
            buffers = get_format(name).allocate(4, 8, 4096, shape.head_dim, "meta", keep=12)
            query = torch.empty(4, 32, 300, shape.head_dim, dtype=torch.bfloat16, device="meta")
            mask = torch.empty(4, 32, 300, 4096, device="meta")
            positions = torch.empty(300, dtype=torch.int64, device="meta")
            attention.attention(query, *buffers, *buffers, positions, mask, 1.0, False, name, name, config=config)
    most = max(kernel.metadata.shared for kernel in compiled)
    names, waits = {kernel.metadata.name for kernel in compiled}, {True: set(), False: set()}
    for kernel in compiled:
        waits[waits_first(kernel.asm["cubin"])].add(kernel.metadata.name)
    undefined = [text for kernel in compiled for text in undefined_registers(kernel.asm["cubin"])]
    spilled = max(spilled_bytes(k.asm["cubin"]) for k in compiled if k.metadata.name == "_learn_kernel")
    print(json.dumps([sorted(names), sorted(waits[True] - waits[False]), undefined, most, spilled]))


if __name__ == "__main__":
    main()
