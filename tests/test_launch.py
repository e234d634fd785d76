"""That a launch which is remembered is the one that triton would have made, with a driver that only notes launches."""

import json

import compile_only
import pytest
import torch

triton = pytest.importorskip("triton")
launch = pytest.importorskip("kvpass.kernels.launch")
tl = triton.language

GRID = (3, 2)


@triton.jit(do_not_specialize=["length"])
def _kernel(x, y, length, stride, factor, BLOCK: tl.constexpr, OTHER: tl.constexpr):
    value = length + stride
    if y is not None:
        value += tl.load(y).to(tl.int32)
    if factor is not None:
        value *= factor
    tl.store(x + tl.arange(0, BLOCK), (value + OTHER).to(x.dtype.element_ty))


class _Noting(compile_only._CompileOnly):
    """Compiles, and notes what would be launched."""

    def __init__(self):
        self.launched, self.utils = [], self

    def launcher_cls(self, source, metadata):
        return lambda *arguments: self.launched.append(arguments)

    def load_binary(self, name, kernel, shared, device):
        return name, object(), 1, 0, 1024  # module, function, registers, spills, threads

    def unload_module(self, module):
        pass

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448}

    def get_active_torch_device(self):
        return torch.device("cpu")


class _Elsewhere:
    """What a kernel takes of a tensor, on a second device."""

    dtype = torch.float32

    def data_ptr(self):
        return 4096

    def get_device(self):
        return 1


def _calls():
    x = torch.empty(64)
    constants = {"OTHER": 8, "num_warps": 1, "BLOCK": 4}  # in another order than the kernel has them
    for arguments in (
        (x, None, 3, 5, 1.0),
        (x.bfloat16(), None, 3, 5, 1.0),
        (x[1:], None, 3, 5, 1.0),
        (x[2:], None, 3, 5, 1.0),
        (x, x, 3, 5, 1.0),
        (x, x.bool(), 3, 5, 1.0),
        (x, x.to(torch.uint8), 3, 5, 1.0),
        (x, x[3:], 3, 5, 1.0),
        (x, None, 1, 5, 1.0),
        (x, None, 2**40, 5, 1.0),
        (x, None, 3, 1, 1.0),
        (x, None, 3, 16, 1.0),
        (x, None, 3, 2**40, 1.0),
        (x, None, 3, 5, 1),
        (x, None, 3, 5, None),
    ):
        yield arguments, constants
    for changes in ({"OTHER": 4, "BLOCK": 8}, {"OTHER": 1}, {"num_warps": 2}, {"num_stages": 1}):
        yield (x, None, 3, 5, 1.0), constants | changes
    yield (x, None, 3, 5, 1.0), {"OTHER": 8, "num_stages": 1, "BLOCK": 4}


def launch_without_gpu() -> None:
    """Print of which calls a form that triton would not have chosen, or other arguments, were launched; whether each
    has an entry; and how many two launches on another device have."""
    triton.runtime.driver.set_active(noting := _Noting())
    remembered, calls = launch.remembered(_kernel), list(_calls())
    chosen = []
    for arguments, constants in calls:
        _kernel[GRID](*arguments, **constants)
        remembered[GRID](*arguments, **constants)
        chosen.append(noting.launched[-2:])
    own, wrong = remembered.kernel, []
    remembered.kernel = None  # nothing is compiled any more
    for index, ((arguments, constants), (by_triton, first)) in enumerate(zip(calls, chosen, strict=True)):
        factor = 2.5 if isinstance(arguments[4], float) else arguments[4]  # of which no form depends
        remembered[GRID](*arguments[:4], factor, **constants)
        given = (*arguments[:4], factor, constants["BLOCK"], constants["OTHER"])
        for launched, expected in ((first, (*arguments, *given[5:])), (noting.launched[-1], given)):
            # The grid, the stream, the function, of which every form has one, and its options
            same = launched[:6] == by_triton[:6] and launched[:4] == (*GRID, 1, 0)
            if not (same and all(x is y or x == y for x, y in zip(launched[-7:], expected, strict=True))):
                wrong.append(index)
    remembered.kernel, before = own, len(remembered._compiled)
    for _ in range(2):
        remembered[GRID](_Elsewhere(), None, 3, 5, 1.0, **calls[0][1])
    print(json.dumps([wrong, before == len(calls), len(remembered._compiled) - before]))


def test_what_is_launched_is_what_triton_would_have_launched():
    assert compile_only.run(__file__) == [[], True, 1]


class _Kernel:
    """Hands out what it is told to."""

    arg_names = ("x", "n", "BLOCK")

    def __init__(self, form):
        self.form, self.launches = form, []

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.launches.append((grid, *arguments)) or self.form


class _Form(triton.compiler.CompiledKernel):
    module = None

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *arguments: self.launches.append((grid, *arguments))


def test_what_is_remembered_has_a_limit(monkeypatch):
    monkeypatch.setattr(launch, "_MOST", 4)
    kernel, x = _Kernel(_Form()), torch.empty(4)
    remembered = launch.Remembered(kernel)
    for n in (*range(10, 20), 19):
        remembered[(2,)](x, n, BLOCK=8)
    assert len(kernel.launches) == 10 and len(remembered._compiled) <= 4
    assert kernel.form.launches == [((2, 1, 1), x, 19, 8)]


@pytest.mark.parametrize("form", [None, object()])
def test_what_cannot_be_launched_is_not_remembered(form):
    kernel, x = _Kernel(form), torch.empty(4)
    remembered = launch.Remembered(kernel)
    for _ in range(2):
        remembered[(2,)](x, 1, BLOCK=8)
    assert kernel.launches == 2 * [((2,), x, 1)]


def test_amd_and_the_interpreter_launch_by_themselves(monkeypatch):
    kernel = triton.JITFunction(_kernel.fn)
    assert isinstance(launch.remembered(kernel), launch.Remembered)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert launch.remembered(kernel) is kernel
    if triton.knobs.runtime.interpret:
        assert launch.remembered(_kernel) is _kernel


if __name__ == "__main__":
    launch_without_gpu()
