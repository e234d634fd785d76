"""That a launch which is remembered is the one that triton would have found."""

import pytest
import torch

pytest.importorskip("triton")
from kvpass.kernels import launch  # noqa: E402

X = torch.empty(64)


class Kernel:
    """Compiles a form for each launch, and notes what is compiled and what is launched."""

    arg_names = ("x", "y", "n", "scale", "BLOCK", "OTHER")

    def __init__(self):
        self.compiled, self.launched = [], []

    def __getitem__(self, grid):
        def compile_and_launch(*args, **constants):
            self.compiled.append(args)
            return Form(self.launched)

        return compile_and_launch


class Form:
    def __init__(self, launched):
        self.launched = launched

    def __getitem__(self, grid):
        return lambda *args: self.launched.append((self, grid, args))


def constants(**changes):
    return {"BLOCK": 4, "OTHER": "a", "num_warps": 1} | changes


def test_the_same_is_compiled_once_and_gets_its_own_grid_and_arguments():
    kernel, calls = Kernel(), [((3,), X[:16], 1.0), ((3,), X[16:], 2.5), ((5, 7), X[32:], 1.0)]
    remembered = launch.Remembered(kernel)
    for grid, x, scale in calls:
        remembered[grid](x, None, 3, scale, **constants())
    assert len(kernel.compiled) == 1 and len({form for form, *_ in kernel.launched}) == 1
    (_, *first), (_, *second) = kernel.launched
    assert first == [(3, 1, 1), (calls[1][1], None, 3, 2.5, 4, "a")]
    assert second == [(5, 7, 1), (calls[2][1], None, 3, 1.0, 4, "a")]


def test_what_is_remembered_has_a_limit(monkeypatch):
    monkeypatch.setattr(launch, "_MOST", 4)
    kernel = Kernel()
    remembered = launch.Remembered(kernel)
    for length in (*range(10, 20), 19):
        remembered[(1,)](X, None, length, 1.0, **constants())
    assert len(kernel.compiled) == 10 and len(kernel.launched) == 1 and len(remembered._compiled) <= 4


@pytest.mark.parametrize(
    ("args", "changes"),
    [
        ((X.bfloat16(), None, 3, 1.0), {}),
        ((X[1:], None, 3, 1.0), {}),  # its address is no multiple of 16
        ((X, X, 3, 1.0), {}),
        ((X, None, 1, 1.0), {}),
        ((X, None, 16, 1.0), {}),
        ((X, None, 2**40, 1.0), {}),
        ((X, None, 3, 1), {}),
        ((X, None, 3, None), {}),
        ((X, None, 3, 1.0), {"BLOCK": 8}),
        ((X, None, 3, 1.0), {"OTHER": "b"}),
        ((X, None, 3, 1.0), {"num_warps": 2}),
        ((X, None, 3, 1.0), {"num_stages": 1}),
    ],
)
def test_what_may_take_another_form_is_compiled(args, changes):
    kernel = Kernel()
    remembered = launch.Remembered(kernel)
    remembered[(1,)](X, None, 3, 1.0, **constants())
    remembered[(1,)](*args, **constants(**changes))
    assert len(kernel.compiled) == 2 and not kernel.launched
    remembered[(1,)](*args, **constants(**changes))
    assert len(kernel.compiled) == 2 and kernel.launched[0][2] == (*args, *list(constants(**changes).values())[:2])
